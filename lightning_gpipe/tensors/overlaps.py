"""Which tensors of several have memory in common."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: a multiple of each type's size


class Overlaps:
    """Tensors that are looked at, and the memory that some of them have in common."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}  # by id
        self._pieces: dict[int, tuple[Tensor, int]] = {}

    def piece_of(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """The memory that a tensor has in common with others, and its place there, in bytes.

        It is ``uint8``, shape ``[bytes]``; None: there is none, or it isn't known yet.
        """
        if not tensor.is_conj() and not tensor.is_neg() and tensor.numel():
            self._tensors[id(tensor)] = tensor
        return self._pieces.get(id(tensor))

    def find(self) -> bool:
        """Find out, for the tensors that were looked at; returns whether there are any."""
        by_memory = defaultdict[int, list[tuple[int, int, int]]](list)
        for key, tensor in self._tensors.items():
            by_memory[tensor.untyped_storage().data_ptr()].append((*stretch(tensor), key))
        for memory, stretches in by_memory.items():
            group: list[tuple[int, int, int]] = []
            for found in sorted(stretches):
                if group and found[0] >= max(end for _, end, _ in group):
                    self._join(memory, group)
                    group = []
                group.append(found)
            self._join(memory, group)
        return bool(self._pieces)

    def _join(self, address: int, group: list[tuple[int, int, int]]) -> None:
        """Note the memory of tensors that overlap."""
        if len(group) < 2:
            return
        start = address + (group[0][0] - address) // _ALIGNED * _ALIGNED
        end = max(end for _, end, _ in group)
        first = self._tensors[group[0][2]]
        memory = torch.empty(0, dtype=torch.uint8, device=first.device)
        memory.set_(first.untyped_storage(), start - address, (end - start,), (1,))
        for begin, _, key in group:
            self._pieces[key] = memory, begin - start


def stretch(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    start = tensor.data_ptr()
    return start, start + (int(last) + 1) * tensor.element_size()
