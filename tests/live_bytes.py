"""Measures the bytes of the tensors that live in a process at one time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Notes when the memory of tensors is taken and given back that operations make in a context.

    What kernels take for themselves isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []  # a number for a piece of memory, and its bytes
        self._known: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                key = self._key(tensor)
                if key not in given and key not in self._known:
                    self._note(tensor)
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before, until they end."""
        for tensor in tensors:
            if self._key(tensor) not in self._known:
                self._note(tensor)

    def peak(self, without: Iterable[Tensor] = ()) -> int:
        """The most bytes that lived at one time.

        Args:
            without: Tensors whose memory isn't counted.
        """
        left_out = {self._known.get(self._key(t)) for t in without}
        held = most = 0
        for number, nbytes in self._events:
            held += 0 if number in left_out else nbytes
            most = max(most, held)
        return most

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return id(tensor.untyped_storage())

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, number, nbytes = id(storage), self._count, storage.nbytes()
        self._count += 1
        self._known[key] = number
        self._events.append((number, nbytes))
        self._refs[number] = weakref.ref(storage, partial(self._end, key, number, nbytes))

    def _end(self, key: int, number: int, nbytes: int, _: Any) -> None:
        self._events.append((number, -nbytes))
        if self._known.get(key) == number:
            del self._known[key]
        del self._refs[number]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of tensors, each piece once."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors if not t.is_meta}
    return sum(storage.nbytes() for storage in storages.values())


def graph_bytes(run: Any, without: Iterable[Tensor]) -> int:
    """Bytes that autograd saves in a call, without the memory of some tensors."""
    own, kept = {id(t.untyped_storage()) for t in without}, {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        result = run()
    del result
    return sum(storage.nbytes() for storage in kept.values())
