"""Tells how deep a model can be: how often its repeated block, until the stages are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_gpipe.plan.memory import LayerMemory

#: Layers of which a repeated block may consist.
_LONGEST = 16
#: Layers of the deepest model that is tried: deeper ones would take minutes.
_MOST_LAYERS = 8192


@dataclass(frozen=True, slots=True)
class Repeated:
    """A block of layers that comes several times in a row.

    Args:
        start: The first of its layers.
        length: Layers of a block.
        count: How often it comes.
    """

    start: int
    length: int
    count: int

    @classmethod
    def find(cls, layers: Sequence[LayerMemory]) -> Repeated | None:
        """The block that makes up most of the layers; None: none comes twice.

        Layers are taken for the same if they hold as much.

        Args:
            layers: What each layer holds.
        """
        looks = [_look(layer) for layer in layers]
        best = None
        for length in range(1, min(_LONGEST, len(looks) // 2) + 1):
            run = 0  # layers in a row that are as those `length` before
            for i in range(length, len(looks)):
                run = run + 1 if looks[i] == looks[i - length] else 0
                count = run // length + 1
                if count > 1 and (best is None or count * length > best.count * best.length):
                    best = cls(i - run - length + 1, length, count)
        return best

    @property
    def limit(self) -> int:
        """How often it comes in the deepest model that is tried."""
        return max(self.count, _MOST_LAYERS // self.length)

    def order(self, layers: int, count: int) -> list[int]:
        """Which layer stands where, if the block came so often.

        Args:
            layers: How many there are.
            count: From 1.
        """
        first = list(range(self.start, self.start + self.length))
        again = [i + self.length for i in first]  # its input comes from such a block, too
        behind = range(self.start + self.count * self.length, layers)
        return [*range(self.start), *first, *again * (count - 1), *behind]

    def block(self, layers: Sequence[LayerMemory], index: int) -> Sequence[LayerMemory]:
        """The layers of one of the blocks."""
        start = self.start + index * self.length
        return layers[start : start + self.length]


class Deeper:
    """A model whose repeated block comes another number of times.

    Every block but the first holds what the second does, in memory of its own; but what all blocks
    share, they share.

    Args:
        repeated: The block.
        layers: What the model's layers hold.
    """

    def __init__(self, repeated: Repeated, layers: Sequence[LayerMemory]) -> None:
        end = repeated.start + repeated.count * repeated.length
        self._before, self._behind = layers[: repeated.start], layers[end:]
        self._first, self._second = repeated.block(layers, 0), repeated.block(layers, 1)
        self._links = _links(self._second, self._first)
        self._links_behind = _links(self._behind, repeated.block(layers, repeated.count - 1))
        self._common = {tensor.key for layer in self._first for tensor in layer.tensors}
        self._blocks, self._last = [self._first], 0

    def layers(self, count: int) -> tuple[LayerMemory, ...]:
        """What the layers hold, if the block came so often, once at least."""
        blocks = self._blocks  # those that were made for fewer are the first ones of more
        while len(blocks) < count:
            blocks.append(self._behind_another(blocks[-1]))
        before = _numbers(blocks[count - 1])
        linked = {number: before[place] for number, place in self._links_behind.items()}
        behind = [
            replace(layer, saved={linked.get(n, n): size for n, size in layer.saved.items()})
            for layer in self._behind
        ]
        inside = [layer for block in blocks[:count] for layer in block]
        return (*self._before, *inside, *behind)

    def _behind_another(self, block: Sequence[LayerMemory]) -> Sequence[LayerMemory]:
        """A copy of the second block behind another one, with numbers that nothing else has."""
        before = _numbers(block)
        numbers = {number: before[place] for number, place in self._links.items()}
        keys: dict[int, int] = {}
        copies = []
        for layer in self._second:
            saved = {numbers.setdefault(n, self._new()): b for n, b in layer.saved.items()}
            tensors = tuple(
                t if t.key in self._common else replace(t, key=keys.setdefault(t.key, self._new()))
                for t in layer.tensors
            )
            copies.append(replace(layer, saved=saved, tensors=tensors))
        return copies

    def _new(self) -> int:
        self._last -= 1  # others are from 0
        return self._last


def deepest(block: Repeated, fits: Callable[[int], bool]) -> int | None:
    """How many blocks fit, none looked for beyond ``block.limit``; None: not even one does.

    Args:
        block: The block.
        fits: Tells whether so many do.
    """
    least, most = 0, block.count  # those that fit, and those that may not
    while fits(most):
        if most >= block.limit:
            return most
        least, most = most, min(2 * most, block.limit)
    while most - least > 1:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least or None


def _look(layer: LayerMemory) -> tuple[object, ...]:
    saved = tuple(layer.saved.values())
    tensors = tuple((t.nbytes, t.gradient, t.optimizer) for t in layer.tensors)
    return layer.input, saved, layer.forward, layer.backward, tensors


def _numbers(block: Sequence[LayerMemory]) -> list[int]:
    return [number for layer in block for number in layer.saved]


def _links(block: Sequence[LayerMemory], before: Sequence[LayerMemory]) -> dict[int, int]:
    """For each number that a block shares with the one before it, a place of it there."""
    places = {number: place for place, number in reversed([*enumerate(_numbers(before))])}
    return {n: places[n] for n in _numbers(block) if n in places}
