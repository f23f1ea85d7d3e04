"""Looks at the operations of a layer's forward, for what they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sized
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.tensors.tree import tree_tensors


class Operations(TorchDispatchMode):
    """Looks at operations of a layer.

    Args:
        own: The layer's parameters and buffers.
        saved: What autograd has saved of the layer so far.
    """

    def __init__(self, own: Iterable[Tensor], saved: Sized) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.own = {id(t.untyped_storage()): t for t in own}
        self._saved, self._live = saved, 0
        #: The most bytes that lived.
        self.forward = 0
        #: The most bytes that come and go with the backward of an operation: the gradients of what
        #: it makes, of what it reads, and of its parameters.
        self.transient = 0
        #: See :class:`lightning_gpipe.plan.memory.LayerMemory`.
        self.first_half = self.arriving = 0
        #: How much had been saved when a parameter was used last.
        self.saved_before = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("It communicates, which other ranks don't expect here.")
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()): t for t in tree_tensors((args, kwargs))}
        new = 0
        for tensor in tree_tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given:
                given[id(storage)] = tensor
                new += storage.nbytes()
                weakref.finalize(storage, self._end, storage.nbytes())
        if new:
            self._live += new
            self.forward = max(self.forward, self._live)
            differentiated = [(key, t) for key, t in given.items() if t.requires_grad]
            weights = sum(t.nbytes for key, t in differentiated if key in self.own)
            read = sum(t.nbytes for key, t in differentiated if key not in self.own)
            self.transient = max(self.transient, new + read + weights)
            kept = new if weights else 0
            self.first_half = max(self.first_half + kept, new + read)
            self.arriving += kept
            if weights:
                self.saved_before = len(self._saved)
        return result

    def _end(self, nbytes: int) -> None:
        self._live -= nbytes
