"""What a batch, or a module, holds, to be put back after a step has changed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpipe.model.places import CONTAINERS, ids_in, refill
from lightning_gpipe.tensors.tree import version_of

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)


class BatchBefore:
    """The entries of the containers in a value, and the values of tensors and arrays.

    Args:
        value: The value.
        most: Elements up to which a tensor or an array is copied; None: each of them is.
        entries: Those up to which a container is looked into; None: into each.
    """

    def __init__(self, value: Any, most: int | None = None, entries: int | None = None) -> None:
        self._most = math.inf if most is None else most
        self._entries = math.inf if entries is None else entries
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}  # by id, which an object kept here holds
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if not issubclass(type(item), _ATOMS) and id(item) not in self._seen:
                self._seen[id(item)] = item
                waiting += self._note(item)

    def _note(self, item: Any) -> list[Any]:
        """Note what an object holds; returns it."""
        kind = type(item)  # a proxy claims to be of another class, or fails to tell
        if issubclass(kind, Tensor):
            if item.numel() <= self._most:
                self._tensors.append((item, item.detach().clone(), version_of(item)))
            return []
        if issubclass(kind, np.ndarray):
            if item.size <= self._most:
                self._arrays.append((item, item.copy()))
            return []
        held: list[Any] = []
        if issubclass(kind, (*CONTAINERS, tuple)) and len(item) > self._entries:
            return []
        if issubclass(kind, CONTAINERS):
            entries = dict(item) if issubclass(kind, dict) else list(item)
            self._containers.append((item, entries))
            held += entries.values() if isinstance(entries, dict) else entries
        elif issubclass(kind, tuple):
            held += item
        if is_dataclass(kind) or issubclass(kind, (Mapping, Sequence)):
            held.append(getattr(item, "__dict__", None))
        return held

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back."""
        for container, entries in self._containers:
            if ids_in(container) != ids_in(entries):
                refill(container, entries)
        for tensor, values, version in self._tensors:
            if version != version_of(tensor):
                tensor.copy_(values)
        for array, elements in self._arrays:
            if array.flags.writeable and array.tobytes() != elements.tobytes():
                array[...] = elements
