"""Tells how deep a model can be: how often its repeated block, until the stages are full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def repeated(self, layers: Sequence[LayerMemory], count: int) -> tuple[LayerMemory, ...]:
        """What the layers hold, if the block came so often.

        Every block but the first holds what the second does, in memory of its own; but what all
        blocks share, they share.

        Args:
            layers: What they hold.
            count: From 1.
        """
        end = self.start + self.count * self.length
        first, second = self._block(layers, 0), self._block(layers, 1)
        blocks, fresh = [first], _Fresh()
        links = _links(second, first)
        while len(blocks) < count:
            blocks.append(fresh.copy(second, links, blocks[-1], first))
        links = _links(layers[end:], self._block(layers, self.count - 1))
        before = _numbers(blocks[-1])
        linked = {number: before[place] for number, place in links.items()}
        behind = [
            replace(layer, saved={linked.get(n, n): size for n, size in layer.saved.items()})
            for layer in layers[end:]
        ]
        inside = [layer for block in blocks for layer in block]
        return (*layers[: self.start], *inside, *behind)

    def _block(self, layers: Sequence[LayerMemory], index: int) -> Sequence[LayerMemory]:
        start = self.start + index * self.length
        return layers[start : start + self.length]


@dataclass(slots=True)
class _Fresh:
    """Makes copies of blocks, with numbers that nothing else has."""

    last: int = 0

    def copy(
        self,
        block: Sequence[LayerMemory],
        links: Mapping[int, int],
        previous: Sequence[LayerMemory],
        first: Sequence[LayerMemory],
    ) -> list[LayerMemory]:
        """A copy of a block behind another one.

        Args:
            block: What is copied.
            links: For a number that the block before it has, too, the place there.
            previous: The block that comes before the copy.
            first: The block before the copied one; what stands in both is shared by all.
        """
        before = _numbers(previous)
        numbers = {number: before[place] for number, place in links.items()}
        common = {tensor.key for layer in first for tensor in layer.tensors}
        keys: dict[int, int] = {}
        copies = []
        for layer in block:
            saved = {numbers.setdefault(n, self._new()): b for n, b in layer.saved.items()}
            tensors = tuple(
                t if t.key in common else replace(t, key=keys.setdefault(t.key, self._new()))
                for t in layer.tensors
            )
            copies.append(replace(layer, saved=saved, tensors=tensors))
        return copies

    def _new(self) -> int:
        self.last -= 1  # others are from 0
        return self.last


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
