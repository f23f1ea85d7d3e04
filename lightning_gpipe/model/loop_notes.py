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
        parts: The parts of each block that were called, none of one that is skipped; an empty name:
            the block itself.
    """

    mains: list[Value] = field(default_factory=list)
    parts: list[list[str]] = field(default_factory=list)
    _notes: list[Noted] = field(default_factory=list)
    _named: dict[int, list[str]] = field(default_factory=dict)  # the parts of each block
    _count: int = 0  # since a block was begun
    _references: dict[int, int] = field(default_factory=dict)  # to hidden states, by the block
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

    def call(
        self, block: int, part: str, spec: TreeSpec, given: Any, main: Value, references: int = 0
    ) -> Value:
        """Note the call of a block, or of a part of it; returns what it makes.

        Args:
            block: The block: the last one, or the next.
            part: The part's dotted name in it; empty: the block itself.
            spec: Of the arguments.
            given: They.
            main: The one of them that is the hidden state.
            references: How many there are to it.
        """
        if block >= len(self.parts):
            self.skip(block)
            self._references[block] = references
            self.parts.append([])
            self.mains.append(main)
            self._count = 0
        self.parts[block].append(part)
        value = self._note(spec, given, None, part)
        self._given |= self._notes[-1].values()
        return value

    def skip(self, block: int) -> None:
        """Note that the blocks before this one that weren't called are skipped."""
        skipped = block - len(self.parts)
        self.parts += [[] for _ in range(skipped)]
        self.mains += [INPUT] * skipped

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
        others = (parts for parts in reversed(self.parts[:block]) if parts not in ([], [""]))
        return next(others, named)

    def wanted(self, alive: Iterable[Value]) -> list[Value]:
        """The values that the model may use behind the last block, as far as the loop tells.

        Those that it has kept for longer than a pass, and, where there are such, or more references
        to it than to others, the hidden state that the last block was given; and those of the last
        pass that stand where others stand that it has used after the next block, or has kept, one
        or two passes before: blocks may be of two kinds in turn. Of two blocks, whose first pass
        has none before it, all that the model has kept. Skipped blocks don't count, but for the end
        of the loop.

        Args:
            alive: What the model has kept.
        """
        alive, last = set(alive), len(self.parts) - 1
        passes = [block for block, parts in enumerate(self.parts) if parts or block == last]
        if len(passes) < 3:
            return sorted(alive)
        found = {v for v in alive if v.block < passes[-2]}
        _, *references = self._references.values()  # those to the input are more
        if found or references[-1] > max(references[:-1], default=references[-1]):
            found |= alive & {self.mains[last]}
        for value in alive - found:
            before = _earlier(value, passes, 1) in alive
            if before or any(self._is_used_like(value, passes, n) for n in (1, 2)):
                found.add(value)
        return sorted(found)

    def _is_used_like(self, value: Value, passes: list[int], number: int) -> bool:
        """Whether what stood in the place of a value, so many passes before, was used after all.

        That is, by functions after the last call of the pass.
        """
        if number >= len(passes):
            return False
        last, block = passes[-1], passes[-1 - number]
        end = self._place(block)
        is_main = value == self.mains[last] and end in self._used[self.mains[block]]
        return is_main or end in self._used[_earlier(value, passes, number)]

    def compiled(self, wanted: list[Value]) -> tuple[BlockCall, ...]:
        """What each stage does, without what nobody needs.

        Args:
            wanted: What comes out beside the last block's output.
        """
        segments: list[list[Noted]] = [[] for _ in self.parts]
        needed, hands, block = set(wanted), [wanted], len(self.parts) - 1
        for noted in reversed(self._notes):  # a function runs with the next call
            if noted.function is None and noted.result.block < block:
                hands += [sorted(needed)] * (block - noted.result.block)
                block = noted.result.block
            made = {v for v in needed if v.whole() == noted.result}
            if made or noted.function is None:
                needed = needed - made | noted.values()
                segments[block].append(noted)
        hands += [sorted(needed)] * block  # through blocks that are skipped
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


def _earlier(value: Value, passes: list[int], number: int) -> Value:
    """What stands in the place of a value, so many passes of the loop before.

    Args:
        value: The value.
        passes: The block of each pass.
        number: How many.
    """
    place = passes.index(value.block) - number if value.block >= 0 else -1 - number
    return value._replace(block=passes[place] if place >= 0 else place)
