"""What a pass of a loop over blocks does, as it is noted, and what each stage does of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec

from lightning_gpipe.model.program import Arguments, BlockCall, Entry, Expected, Operation


class Value(NamedTuple):
    """What a promise stands for.

    Args:
        block: The block that was called last when it was noted, or is called then; -1: none, so it
            is what the first one is given.
        operation: The number of the call since then, of the block, a part of it or a function.
        element: Its place in what that returns.
    """

    block: int
    operation: int = 0
    element: int = 0

    def before(self) -> Value:
        """What stands in its place in the pass of the loop before."""
        return self._replace(block=self.block - 1)

    def whole(self) -> Value:
        """The first element of what it is an element of."""
        return self._replace(element=0)


INPUT = Value(-1)


class Given(NamedTuple):
    """An argument as it was noted."""

    tensor: int | None = None
    constant: Any = None
    value: Value | None = None


class Noted(NamedTuple):
    """A call of a block, of a part of one, or of a function, as it was noted.

    Args:
        result: What it makes.
        spec: Of the arguments.
        given: They.
        function: Its name; None: it is a block's or a part's.
        part: The part's dotted name in its block; empty: the block itself.
    """

    result: Value
    spec: TreeSpec
    given: tuple[Given, ...]
    function: str | None = None
    part: str = ""

    def values(self) -> set[Value]:
        """Those that it is given."""
        return {g.value for g in self.given if g.value is not None}


@dataclass(slots=True)
class LoopNotes:
    """Calls of blocks, and the functions between them.

    Args:
        mains: The hidden state that each block was given.
        parts: The parts of each block that were called; an empty name: the block itself.
    """

    mains: list[Value] = field(default_factory=list)
    parts: list[list[str]] = field(default_factory=list)
    _notes: list[Noted] = field(default_factory=list)
    _named: dict[int, list[str]] = field(default_factory=dict)  # the parts of each block
    _count: int = 0  # since a block was begun
    _used: defaultdict[Value, set[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )  # between blocks: after which one's call, and after how many parts of it
    _own: set[Value] = field(default_factory=set)
    _specs: dict[Value, str] = field(default_factory=dict)
    _given: set[Value] = field(default_factory=set)  # to blocks
    _expected: defaultdict[Value, dict[int, Expected]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by what is called, and by the element

    def returns(self, value: Value, spec: str) -> None:
        """Note the structure of what a call returns, of which the model is told; see Operation."""
        self._specs[value] = spec

    def call(self, block: int, part: str, spec: TreeSpec, given: Any, main: Value) -> Value:
        """Note the call of a block, or of a part of it; returns what it makes.

        Args:
            block: The block: the last one, or the next.
            part: The part's dotted name in it; empty: the block itself.
            spec: Of the arguments.
            given: They.
            main: The one of them that is the hidden state.
        """
        if block == len(self.parts):
            self.parts.append([])
            self.mains.append(main)
            self._count = 0
        self.parts[block].append(part)
        value = self._note(spec, given, None, part)
        self._given |= self._notes[-1].values()
        return value

    def function(self, name: str, spec: TreeSpec, given: tuple[Given, ...]) -> Value:
        """Note the call of a function; returns what it makes."""
        value = self._note(spec, given, name)
        for used in self._notes[-1].values():
            self.use(used)
        return value

    def use(self, value: Value) -> None:
        """Note that a value, or its shape or type, is used between the calls of blocks."""
        self._used[value].add(self._place(len(self.parts) - 1))

    def change(self, value: Value) -> bool:
        """Note that a value is changed in place; False: a block may have handed it through."""
        self._own.add(value)
        return value not in self._given

    def expect(self, value: Value, look: Tensor | None, with_dtype: bool = False) -> None:
        """Note what the model goes by of what a block returns: its shape, its type if it is read.

        Args:
            value: What it returns.
            look: Has them; None: it is None.
            with_dtype: Whether the type is read, too.
        """
        expected = self._expected[value.whole()]
        known = expected.get(value.element)
        shape = None if look is None else look.shape
        dtype = look.dtype if look is not None and with_dtype else known and known.dtype
        of_sample = None if shape is None else (-1, *shape[1:]) if shape else ()
        expected[value.element] = Expected(value.element, of_sample, dtype)

    def is_due(self, part: str, block: int, named: list[str], is_last: bool) -> bool:
        """Whether a part of a block may be called next: parts are called as in the block before.

        In the first block, and in one that has other parts than the block before, in any order.

        Args:
            part: Its name.
            block: The block.
            named: The parts as they stand in the block.
            is_last: Whether it is the last one, of which it must be known when it is complete.
        """
        self._named[block] = named
        if block == 0 or (not is_last and named != self._named.get(block - 1)):
            return True
        due = self._due(block, named)
        done = self.parts[block] if block < len(self.parts) else []
        return due[: len(done) + 1] == [*done, part]

    def is_complete(self, blocks: int, named: list[str]) -> bool:
        """Whether all of so many blocks have been called, the last one with all of its parts."""
        last = blocks - 1
        if len(self.parts) < blocks:
            return False
        return self.parts[last] == [""] or self.parts[last] == self._due(last, named)

    def _due(self, block: int, named: list[str]) -> list[str]:
        """The parts of a block that are to be called: those of the one before it that has some."""
        others = (parts for parts in reversed(self.parts[:block]) if parts != [""])
        return next(others, named)

    def wanted(self, alive: Iterable[Value]) -> list[Value]:
        """The values that the model may use behind the last block, as far as the loop tells.

        Those that it has kept for longer than a pass, and those of the last pass that stand where
        others stand that it has used after the next block, or has kept, one or two passes before:
        blocks may be of two kinds in turn. Of two blocks, whose first pass has none before it, all
        that the model has kept.

        Args:
            alive: What the model has kept.
        """
        alive, last = set(alive), len(self.parts) - 1
        if last < 2:
            return sorted(alive)
        found = {v for v in alive if v.block < last - 1}
        for value in alive - found:
            before = value.before()
            if before in alive or any(self._is_used_like(value, passes) for passes in (1, 2)):
                found.add(value)
        return sorted(found)

    def _is_used_like(self, value: Value, passes: int) -> bool:
        """Whether what stood in the place of a value, so many passes before, was used after all.

        That is, by functions after the last call of the pass.
        """
        last = len(self.parts) - 1
        if passes > last:
            return False
        end, before = self._place(last - passes), value._replace(block=value.block - passes)
        is_main = value == self.mains[last] and end in self._used[self.mains[last - passes]]
        return is_main or end in self._used[before]

    def compiled(self, wanted: list[Value]) -> tuple[BlockCall, ...]:
        """What each stage does, without what nobody needs.

        Args:
            wanted: What comes out beside the last block's output.
        """
        segments: list[list[Noted]] = [[] for _ in self.parts]
        needed, hands, block = set(wanted), [wanted], len(self.parts) - 1
        for noted in reversed(self._notes):  # a function runs with the next call
            if noted.function is None and noted.result.block < block:
                hands.append(sorted(needed))
                block = noted.result.block
            made = {v for v in needed if v.whole() == noted.result}
            if made or noted.function is None:
                needed = needed - made | noted.values()
                segments[block].append(noted)
        found, handed = [], [INPUT]
        for notes, out in zip(segments, reversed(hands), strict=True):
            found.append(self._compiled(handed, notes[::-1], out))
            handed = out
        return tuple(found)

    def _compiled(self, handed: list[Value], notes: list[Noted], hands: list[Value]) -> BlockCall:
        """What the stage of a block does with what it is handed."""
        places = {value: i for i, value in enumerate(handed)}
        returned = dict[Value, int]()  # by blocks and their parts

        def entry(value: Value) -> Entry:
            if value in places:
                return Entry(value=places[value])
            return Entry(value=returned[value.whole()], element=value.element)

        operations: list[Operation] = []
        for noted in notes:
            entries = (
                Entry(g.tensor, g.constant) if g.value is None else entry(g.value)
                for g in noted.given
            )
            arguments, result = Arguments(noted.spec, tuple(entries)), noted.result
            place = len(handed) + len(operations)
            if noted.function is None:
                own = tuple(sorted(v.element for v in self._own if v.whole() == result))
                expects = tuple(self._expected[result].values())
                structure = self._specs.get(result)
                operations.append(Operation(None, noted.part, arguments, own, expects, structure))
                returned[result] = place
            else:
                operations.append(Operation(noted.function, "", arguments))
                places[result] = place
        return BlockCall(tuple(operations), tuple(entry(v) for v in hands))

    def _note(
        self, spec: TreeSpec, given: tuple[Given, ...], function: str | None, part: str = ""
    ) -> Value:
        value = Value(len(self.parts) - 1, self._count)
        self._notes.append(Noted(value, spec, given, function, part))
        self._count += 1
        return value

    def _place(self, block: int) -> tuple[int, int]:
        """A place in the loop: after a block's last part so far."""
        return block, len(self.parts[block]) if block >= 0 else 0
