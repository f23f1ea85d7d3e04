"""Runs modules on the meta device: shapes and types, no values and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors.tree import Tree


class UntraceableLayer(RuntimeError):
    """A layer can't run without data, on the meta device."""


def run_on_meta(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module on the meta device, where nothing is computed and no memory used.

    Raises:
        UntraceableLayer: If it needs the values of its input.
    """
    tree = Tree.of((args, kwargs), "The example")
    value = tree.with_leaves([to_meta_leaf(leaf) for leaf in tree.leaves]).value()

    def call(_: int, forward: Any, given: Any) -> Any:
        return forward(*given[0], **given[1])

    return run_layer_on_meta(module, call, 0, value)


def run_layer_on_meta(module: nn.Module, run_layer: RunLayer, index: int, value: Any) -> Any:
    """Run a layer with tensors on the meta device."""
    tensors = {
        name: to_meta_leaf(t) for name, t in (*module.named_parameters(), *module.named_buffers())
    }

    def forward(*args: Any, **kwargs: Any) -> Any:
        return functional_call(module, tensors, args, kwargs)

    try:
        with torch.no_grad():
            return run_layer(index, forward, value)
    except Exception as error:
        raise UntraceableLayer(
            f"{type(module).__name__} can't run on the meta device, without data"
            f" ({type(error).__name__}: {error})"
        ) from error


def to_meta_leaf(leaf: Any) -> Any:
    """A tensor of the same shape, strides and type on the meta device; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.no_grad():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
