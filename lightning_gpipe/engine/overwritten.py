"""Tensors that layers would have changed in place, had they not been given copies.

A backbone whose first layer works in place, such as a ReLU, changes its input on one device, and
what the step does with it afterwards is done with the changed one. In a pipeline it stays as it is,
so using it in the same step is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.engine.executor import MiniBatch
from lightning_gpipe.model.remote import is_metadata
from lightning_gpipe.tensors.tree import Tree


class Overwritten(Tensor):
    """A tensor of the user's whose values would be others on one device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            "The backbone's first layer changes its input in place, such as nn.ReLU(inplace=True),"
            " and the step uses that input afterwards. On one device it would be the changed one,"
            " and in a pipeline it isn't. Give the backbone a clone, or let the layer not work in"
            " place."
        )


class Overwrites:
    """The user's tensors that are :class:`Overwritten` in the running step."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def mark(self, batch: MiniBatch, given: Tree) -> None:
        """Refuse to have tensors used from now on.

        Args:
            batch: The forwards of a mini-batch.
            given: The backbone's input, of which ordinary tensors are marked.
        """
        call = batch.calls.get(0)  # of the first stage, if it is here
        tensors = given.tensors() if call is not None and call.overwritten else []
        for i, tensor in enumerate(tensors):
            if call is not None and i in call.overwritten and type(tensor) is Tensor:
                tensor.__class__ = Overwritten
                self._tensors.append(weakref.ref(tensor))

    def forget(self) -> None:
        """Let all be used again."""
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = Tensor
        self._tensors.clear()
