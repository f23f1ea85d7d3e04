"""What layers would have changed in place, had they not been given copies.

A backbone whose first layer works in place, such as a ReLU, or puts something into a dictionary,
changes its input on one device, and what the step does with it afterwards is done with the changed
one. In a pipeline it stays as it is, so using it in the same step is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyPath, MappingKey, SequenceKey

from lightning_gpipe.engine.executor import MiniBatch
from lightning_gpipe.model.remote import is_metadata
from lightning_gpipe.tensors.tree import Tree


class Overwritten(Tensor):
    """A tensor of the user's whose values would be others on one device."""

    why = (
        "The backbone's first layer changes its input in place, such as nn.ReLU(inplace=True), and"
        " the step uses that input afterwards. On one device it would be the changed one, and in a"
        " pipeline it isn't. Give the backbone a clone, or let the layer not work in place."
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
        raise RuntimeError(cls.why)


class Replaced(Overwritten):
    """An entry of the user's in whose place another one would stand on one device."""

    why = (
        "The backbone's layers put something into a list or a dictionary that they are given, and"
        " the step uses what stands there afterwards. In a pipeline the step's own stays as it is:"
        " use what the backbone returns, as in d = self.backbone(d)."
    )


class Overwrites:
    """The user's tensors that are :class:`Overwritten` in the running step."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def mark(self, batch: MiniBatch, given: Tree, container: Any) -> None:
        """Refuse to have tensors used from now on.

        Args:
            batch: The forwards of a mini-batch.
            given: The backbone's input, of which ordinary tensors are marked.
            container: The same as the user has given it.
        """
        call = batch.calls.get(0)  # of the first stage, if it is here
        tensors = given.tensors() if call is not None and call.overwritten else []
        for i, tensor in enumerate(tensors):
            if call is not None and i in call.overwritten and type(tensor) is Tensor:
                tensor.__class__ = Overwritten
                self._tensors.append(weakref.ref(tensor))
        for path in call.replaced if call is not None else ():
            _replaced(container, path)

    def forget(self) -> None:
        """Let all be used again."""
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                tensor.__class__ = Tensor
        self._tensors.clear()


def _replaced(entry: Any, path: KeyPath) -> Any:
    """What stands in the place of an entry whose part at a path, if there is one, is unusable."""
    if not path or not isinstance(entry, (dict, list, tuple)):
        return _unusable(entry)
    step: Any = path[0]
    left = path[1:]
    if isinstance(entry, dict) and isinstance(step, MappingKey):
        entry[step.key] = _replaced(entry.get(step.key), left)
    elif isinstance(entry, list) and isinstance(step, SequenceKey):
        entry += [None] * (step.idx + 1 - len(entry))
        entry[step.idx] = _replaced(entry[step.idx], left)
    elif isinstance(entry, tuple):
        names = getattr(entry, "_fields", ())  # of a named one
        index = names.index(step.name) if isinstance(step, GetAttrKey) else step.idx
        if index < len(entry):
            made = *entry[:index], _replaced(entry[index], left), *entry[index + 1 :]
            return type(entry)._make(made) if names else made  # type: ignore[attr-defined]
    return entry


def _unusable(entry: Any) -> Tensor:
    """What looks as an entry does, as far as it is a tensor."""
    with torch._C.DisableTorchFunction():  # what follows the step counts its functions
        own = entry if isinstance(entry, Tensor) else torch.empty(1, device="meta")
        unusable = own.detach()
    unusable.__class__ = Replaced
    return unusable
