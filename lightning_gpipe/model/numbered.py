"""The values of a mini-batch's steps that not every stage has, by their numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_gpipe.model.remote import Number, Origin, RemoteTensor, origin_of, set_origin


class Numbered:
    """Values that not every stage has, while they live.

    Args:
        stage: This rank's stage.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._made: dict[Number, weakref.ref[Tensor]] = {}

    def note(self, tensor: Tensor, origin: Origin) -> None:
        """Note a value."""
        set_origin(tensor, origin)
        self._made[origin.number] = weakref.ref(tensor)

    def left(self) -> dict[Number, Tensor]:
        """What is left of the values that this stage tells the others."""
        return {
            number: tensor.detach()
            for number in self._made
            for tensor, origin in self._living(number)
            if min(origin.where) == self._stage and not isinstance(tensor, RemoteTensor)
        }

    def tell(self, values: Mapping[Number, Tensor]) -> None:
        """Give remote tensors that are left the values that other stages have told."""
        for number, value in values.items():
            for tensor, origin in self._living(number):
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

    def _living(self, number: Number) -> Iterator[tuple[Tensor, Origin]]:
        """What has a number, and where it comes from, if it is left and is still that value."""
        made = self._made.get(number)
        tensor = made() if made is not None else None
        origin = origin_of(tensor) if tensor is not None else None
        if tensor is not None and origin is not None and origin.number == number:
            yield tensor, origin
