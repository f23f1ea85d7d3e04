"""Runs a layer with copies of its tensors, so that nothing of the call is left in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.model.on_meta import Attributes, hooks_of_torch
from lightning_gpipe.tensors import strides


@contextmanager
def on_copies(layer: nn.Module) -> Iterator[None]:
    """Let a layer compute with copies of its parameters and buffers inside this context.

    Without the user's hooks, and with batch norm as in evaluation. Behind it the modules have what
    they had.

    Args:
        layer: It holds one copy of its tensors for as long.

    Raises:
        TypeError: If a part is a compiled script, which keeps its own.
    """
    parts = [*layer.modules()]
    kept, copies = Attributes(parts), dict[int, Tensor]()
    try:
        for part in parts:
            _ready(part, copies)
        yield
    finally:
        kept.restore()


def _ready(part: nn.Module, copies: dict[int, Tensor]) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError("a compiled script keeps its own tensors")
    own = part.__dict__
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    own |= {name: _copy(value, copies) for name, value in tensors.items()}
    for kind in ("_parameters", "_buffers"):
        own[kind] = {
            name: _copy(value, copies) if value is not None else None
            for name, value in own[kind].items()
        }
    own |= hooks_of_torch(part)
    if isinstance(part, _BatchNorm):
        own["training"] = False


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    copied = strides.copy_once(tensor, copies)
    if isinstance(tensor, nn.Parameter) and not isinstance(copied, nn.Parameter):
        copied = copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad)
    return copied
