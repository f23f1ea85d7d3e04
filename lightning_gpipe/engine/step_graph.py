"""The graph of a step's loss, from where samples come in."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.tensors.graph import next_of, nodes_of


@dataclass(frozen=True, slots=True)
class Samples:
    """A micro-batch's data, as far as graphs show where they come in.

    Args:
        count: How many samples there are.
        apart: How many elements lie between two of them, by the storage that they lie in.
    """

    count: int
    apart: dict[int, set[int]]

    @classmethod
    def of(cls, count: int, given: Iterable[Tensor]) -> Samples:
        """Those in tensors that a step was given."""
        plain = (t for t in given if t.layout == torch.strided and not t.is_nested and t.numel())
        apart = dict[int, set[int]]()
        for tensor in plain:
            if tensor.ndim and len(tensor) == count:
                apart.setdefault(tensor.untyped_storage()._cdata, set()).add(tensor.stride(0))
        return cls(count, apart)

    def come_in(self, node: Any) -> bool:
        """Whether an operation takes data, and makes rows that belong to samples each.

        Data that were converted before lie in other memory, and aren't known.
        """
        made = getattr(node, "_input_metadata", ())
        takes = any(following is None for following, _ in node.next_functions)
        if not self.apart or not made or not (takes or node.name().startswith("Embedding")):
            return False
        names = [name for name in dir(node) if name.startswith("_saved_")]
        return self._are_rows(made[0]) and any(self._has(node, name) for name in names)

    def _has(self, node: Any, name: str) -> bool:
        """Whether an operation has saved rows of data."""
        try:
            kept = getattr(node, name)
        except RuntimeError:  # it was changed in place since, or isn't kept any more
            return False
        if not isinstance(kept, Tensor) or kept.requires_grad or not self._are_rows(kept):
            return False
        if kept.layout != torch.strided or kept.is_nested:
            return False
        apart = kept.stride(0) * (len(kept) // self.count)
        return apart in self.apart.get(kept.untyped_storage()._cdata, ())

    def _are_rows(self, made: Any) -> bool:
        try:
            return bool(made.shape) and made.shape[0] > 0 and made.shape[0] % self.count == 0
        except RuntimeError:  # a nested tensor has no shape
            return False


def made_of(is_start: Callable[[Any], bool], node: Any) -> set[Any]:
    """Those of a graph's nodes that compute with certain ones, and these.

    Args:
        is_start: Tells them.
        node: The node that leads to all others.
    """
    users, found = dict[Any, list[Any]](), list[Any]()
    for each in nodes_of([node]):
        if is_start(each):
            found.append(each)
        for following in next_of(each):
            users.setdefault(following, []).append(each)
    return {*nodes_of(found, lambda used: users.get(used, ()))}


def look_of(node: Any) -> int:
    """What tells a graph from others: the kinds of its nodes, in order."""
    look = 0
    for each in nodes_of([node]):
        look = zlib.crc32(type(each).__name__.encode(), look)
    return look
