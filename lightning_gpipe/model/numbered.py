"""The values of a mini-batch's steps that not every stage has, by their numbers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gpipe.model.remote import (
    Number,
    Origin,
    RemoteTensor,
    origin_of,
    set_origin,
    told,
)


class Numbered:
    """Values that not every stage has, while they live.

    Args:
        stage: This rank's stage.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._made: dict[Number, weakref.ref[Tensor]] = {}
        self._kept: dict[Number, tuple[Tensor, Origin]] = {}

    def note(self, tensor: Tensor, origin: Origin) -> None:
        """Note a value."""
        set_origin(tensor, origin)
        self._made[origin.number] = weakref.ref(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a value for what comes after the steps, whatever becomes of the tensor.

        Args:
            tensor: What has been noted.

        Returns:
            The value without its graph; a remote one has it once it is told.
        """
        origin = origin_of(tensor)
        if origin is None:
            return tensor.detach().clone()
        kept, _ = self._kept.get(origin.number, (None, None))
        if kept is None:
            own = told(tensor)  # one of an earlier mini-batch that a function has changed in place
            if isinstance(own, RemoteTensor):
                kept = RemoteTensor.like(own, own._gpipe_device, origin, requires_grad=False)
            else:
                kept = own.detach().clone()
            self._kept[origin.number] = kept, origin
        return kept

    def left(self) -> dict[Number, Tensor]:
        """What is left of the values that this stage tells the others."""
        numbers = [number for number, made in self._made.items() if made() is not None]
        living = {n: found for n in numbers if (found := self._living(n)) is not None}
        return {
            number: value.detach()
            for number, (tensor, origin) in {**living, **self._kept}.items()
            for value in [told(tensor)]
            if min(origin.where) == self._stage and not isinstance(value, RemoteTensor)
        }

    def has(self, tensor: Tensor) -> bool:
        """Whether a value is one of this mini-batch."""
        origin = origin_of(tensor)
        made = self._made.get(origin.number) if origin is not None else None
        return made is not None and made() is tensor

    def tell(self, values: Mapping[Number, Tensor]) -> None:
        """Give remote tensors that are left the values that other stages have told."""
        for number, value in values.items():
            for found in self._living(number), self._kept.get(number):
                if found is None:
                    continue
                tensor, origin = found
                if isinstance(tensor, RemoteTensor):
                    tensor.tell(value)
                elif self._stage not in origin.where:  # changed in place by a remote one
                    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                        tensor.copy_(value)

    def clear(self) -> None:
        """Let go of the mini-batch; what was told is everywhere."""
        for made in self._made.values():
            if (tensor := made()) is not None:
                set_origin(tensor, None)
        self._made.clear()
        self._kept.clear()

    def _living(self, number: Number) -> tuple[Tensor, Origin] | None:
        """What has a number, and where it comes from, if it is left and is still that value."""
        made = self._made.get(number)
        tensor = made() if made is not None else None
        origin = origin_of(tensor) if tensor is not None else None
        if tensor is None or origin is None or origin.number != number:
            return None
        return tensor, origin
