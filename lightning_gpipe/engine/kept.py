"""What layers and their hooks keep of a forward in attributes of modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_gpipe.tensors.tree import version_of


class KeptTensors:
    """The tensors that a forward leaves in attributes, alone or in lists, tuples and dicts.

    Args:
        modules: In whose attributes; the backbone's and those around it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = self._now()

    def new(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Those that weren't there when this was made, or were changed in place since.

        Args:
            given: What the forward was given, which isn't its own.
        """
        with torch._C.DisableTorchFunctionSubclass():
            memory = {_memory(tensor) for tensor in given}
            return [
                tensor
                for key, tensor in self._now().items()
                if key not in self._before and _memory(tensor) not in memory
            ]

    def _now(self) -> dict[tuple[int, int], Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            return {
                (id(tensor), version_of(tensor)): tensor
                for part in self._modules
                for tensor in _attributes(part)
            }


def _memory(tensor: Tensor) -> int:
    """What tells whether two tensors share their memory."""
    is_plain = tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if is_plain else id(tensor)


def _attributes(module: nn.Module) -> list[Tensor]:
    others = ("_parameters", "_buffers", "_modules")
    values = [value for name, value in vars(module).items() if name not in others]
    seen: dict[int, Any] = {}

    def is_seen(value: Any) -> bool:
        """Whether it was looked into before: a dict may contain itself."""
        if id(value) in seen:
            return True
        seen[id(value)] = value
        return False

    # a proxy claims to be of another class, or fails to tell
    return [leaf for leaf in tree_leaves(values, is_seen) if issubclass(type(leaf), Tensor)]
