"""What layers and their hooks keep of a forward in attributes of modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_gpipe.model.remote import tensors_in


class KeptTensors:
    """The tensors that a forward leaves in attributes, alone or in lists, tuples and dicts.

    Args:
        modules: In whose attributes; the backbone's and those around it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = self._now()

    def new(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Those that weren't there when this was made.

        Args:
            given: What the forward was given, which isn't its own.
        """
        found = [t for key, t in self._now().items() if key not in self._before]
        with torch._C.DisableTorchFunctionSubclass():
            memory = {t.untyped_storage()._cdata for t in given}
            return [t for t in found if t.untyped_storage()._cdata not in memory]

    def _now(self) -> dict[int, Tensor]:
        return {id(tensor): tensor for part in self._modules for tensor in _attributes(part)}


def _attributes(module: nn.Module) -> list[Tensor]:
    others = ("_parameters", "_buffers", "_modules")
    return [
        tensor
        for name, value in vars(module).items()
        if name not in others
        for tensor in tensors_in(value)
    ]
