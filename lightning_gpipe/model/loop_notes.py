"""What a pass of a loop over blocks does, as it is noted, and what each stage does of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lightning_gpipe.model.program import Arguments, BlockCall, Entry, Operation


class Value(NamedTuple):
    """What a promise stands for.

    Args:
        block: The block that returns it, or the next one.
        operation: The number of the function before the block that makes it; None: it is the
            block's, and of block -1 the first one's input.
        element: Its place in what the block returns.
    """

    block: int
    operation: int | None = None
    element: int = 0

    def is_of(self, block: int) -> bool:
        """Whether a block returns it."""
        return self.block == block and self.operation is None

    def before(self) -> Value:
        """What stands in its place in the pass of the loop before."""
        return self._replace(block=self.block - 1)


INPUT = Value(-1)


class Given(NamedTuple):
    """An argument as it was noted."""

    tensor: int | None = None
    constant: Any = None
    value: Value | None = None


class Noted(NamedTuple):
    """A call of a block or a function, as it was noted.

    Args:
        name: Of the function.
        result: What it makes.
        spec: Of the arguments.
        given: They.
    """

    name: str
    result: Value
    spec: TreeSpec
    given: tuple[Given, ...]

    def values(self) -> set[Value]:
        """Those that it is given."""
        return {g.value for g in self.given if g.value is not None}

    def arguments(self, places: dict[Value, int]) -> Arguments:
        """Its arguments, as a stage finds them."""
        entries = (
            Entry(g.tensor, g.constant, None if g.value is None else places[g.value])
            for g in self.given
        )
        return Arguments(self.spec, tuple(entries))


@dataclass(slots=True)
class LoopNotes:
    """Calls of blocks, and the functions between them.

    Args:
        calls: Of blocks.
        mains: The hidden state that each was given.
    """

    calls: list[Noted] = field(default_factory=list)
    mains: list[Value] = field(default_factory=list)
    _operations: list[list[Noted]] = field(default_factory=lambda: [[]])  # before each call
    _used: defaultdict[Value, set[int]] = field(default_factory=lambda: defaultdict(set))
    _own: set[Value] = field(default_factory=set)
    _expected: dict[int, tuple[tuple[int, ...], torch.dtype | None]] = field(default_factory=dict)

    def call(self, spec: TreeSpec, given: tuple[Given, ...], main: Value) -> None:
        """Note the call of a block."""
        self.calls.append(Noted("", Value(len(self.calls)), spec, given))
        self.mains.append(main)
        self._operations.append([])

    def operation(self, name: str, spec: TreeSpec, given: tuple[Given, ...]) -> Value:
        """Note a function before the next block; returns what it makes."""
        segment = len(self.calls)
        value = Value(segment, len(self._operations[segment]))
        noted = Noted(name, value, spec, given)
        self._operations[segment].append(noted)
        for used in noted.values():
            self._used[used].add(segment)
        return value

    def change(self, value: Value) -> None:
        """Note that a value is changed in place."""
        self._own.add(value)

    def expect(self, block: int, look: Tensor, with_dtype: bool) -> None:
        """Note what the model goes by of a block's output: its shape, and its type if it is read.

        Args:
            block: The block.
            look: Has them.
            with_dtype: Whether the type is read, too.
        """
        _, dtype = self._expected.get(block, ((), None))
        dtype = look.dtype if with_dtype else dtype
        self._expected[block] = tuple(look.shape[1:]), dtype

    def wanted(self, alive: Iterable[Value]) -> list[Value]:
        """The values that the model may use behind the last block, as far as the loop tells.

        Those that it has kept for longer than a pass, and those of the last pass that stand where
        others stand that it has used after the next block, or has kept.

        Args:
            alive: What the model has kept.
        """
        alive, last = set(alive), len(self.calls) - 1
        newest = {v for v in alive if v.block == (last - 1 if v.operation is None else last)}
        found = alive - newest
        for value in newest:
            before = value.before()
            is_main = value == self.mains[last] and last in self._used[self.mains[last - 1]]
            if is_main or last in self._used[before] or before in alive:
                found.add(value)
        return sorted(found, key=_order)

    def compiled(self, wanted: list[Value]) -> tuple[BlockCall, ...]:
        """What each stage does, without what nobody needs.

        Args:
            wanted: What comes out beside the last block's output.
        """
        parts: list[tuple[list[Noted], list[Value]]] = []
        hands = wanted
        for index in range(len(self.calls) - 1, -1, -1):
            needed = {v for v in hands if not v.is_of(index)}
            needed |= self.calls[index].values()
            operations = []
            for operation in reversed(self._operations[index]):
                if operation.result in needed:
                    operations.append(operation)
                    needed = needed - {operation.result} | operation.values()
            parts.append((operations[::-1], hands))
            hands = sorted(needed, key=_order)
        found, handed = [], [INPUT]
        for index, (operations, hands) in enumerate(reversed(parts)):
            found.append(self._compiled(index, handed, operations, hands))
            handed = hands
        return tuple(found)

    def _compiled(
        self, index: int, handed: list[Value], operations: list[Noted], hands: list[Value]
    ) -> BlockCall:
        """What the stage of a block does with what it is handed."""
        places = {value: i for i, value in enumerate(handed)}
        run = []
        for operation in operations:
            run.append(Operation(operation.name, operation.arguments(places)))
            places[operation.result] = len(places)
        arguments = self.calls[index].arguments(places)
        first = len(places)
        places |= {v: first + v.element for v in (*hands, *self._own) if v.is_of(index)}
        own = tuple(sorted(places[v] for v in self._own if v.is_of(index)))
        expected = self._expected.get(index, (None, None))
        out = tuple(places[v] for v in hands)
        return BlockCall(arguments, tuple(run), out, own, *expected)


def _order(value: Value) -> tuple[int, bool, int, int]:
    """The order in which values come to be."""
    is_output = value.operation is None
    return value.block, is_output, value.operation or 0, value.element
