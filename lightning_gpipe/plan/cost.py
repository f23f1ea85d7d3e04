"""What each layer of a backbone costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.model.on_meta import (
    run_layer_on_meta,
    run_on_meta,
    to_meta_leaf,
)
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors.tree import Tree

CostFunction: TypeAlias = Callable[[nn.Module, Any], float]
Balance: TypeAlias = Literal["flops", "params"] | Sequence[int] | CostFunction


def parameter_costs(layers: Sequence[nn.Module]) -> list[float]:
    """Number of parameters of each layer."""
    return [float(sum(p.numel() for p in layer.parameters())) for layer in layers]


def flop_costs(layers: Sequence[nn.Module], run_layer: RunLayer, sample: Any) -> list[float]:
    """Floating-point operations of each layer's forward.

    Matrix products, convolutions and attention count their operations, everything else one
    operation per element that comes out, so that no layer is free.

    Args:
        layers: The layers, on any device; nothing is computed and no memory used.
        run_layer: Runs one of them.
        sample: The input of the first layer, a pytree of tensors ``[batch, …]``.

    Raises:
        UntraceableLayer: If a layer needs the values of its input.
    """
    costs, before = [], 0
    with FlopCounterMode(display=False) as counter:
        for _, _, output in _walk(layers, run_layer, sample):
            total = counter.get_total_flops()
            elements = sum(t.numel() for t in Tree.of(output, "A layer's output").tensors())
            costs.append(float(total - before + elements))
            before = total
    return costs


def function_costs(
    layers: Sequence[nn.Module], run_layer: RunLayer, sample: Any, cost: CostFunction
) -> list[float]:
    """Cost of each layer by a function.

    Args:
        layers: The layers.
        run_layer: Runs one of them.
        sample: The input of the first layer, a pytree of tensors ``[batch, …]``.
        cost: Called with a layer and its input, whose tensors are on the meta device: shapes and
            types, no values.

    Raises:
        UntraceableLayer: If a layer needs the values of its input.
    """
    return [float(cost(layer, value)) for layer, value, _ in _walk(layers, run_layer, sample)]


def module_flops(module: nn.Module, sample: Any) -> dict[str, float]:
    """Floating-point operations of every submodule by name, the whole module's under ``""``.

    Raises:
        UntraceableLayer: If the forward needs the values of its input.
    """
    named = sample if isinstance(sample, dict) else {}
    listed = sample if isinstance(sample, (tuple, list)) else () if named else (sample,)
    with FlopCounterMode(module, display=False) as counter:
        run_on_meta(module, *listed, **named)
    root = type(module).__name__
    counts = {name: float(sum(ops.values())) for name, ops in counter.get_flop_counts().items()}
    flops = {
        name.removeprefix(f"{root}."): count
        for name, count in counts.items()
        if name not in ("Global", root)
    }
    return {**flops, "": counts.get("Global", 0.0)}


def _walk(
    layers: Sequence[nn.Module], run_layer: RunLayer, sample: Any
) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Run layers on the meta device; yields each with its input and its output."""
    tree = Tree.of(sample, "The backbone's input")
    value = tree.with_leaves([to_meta_leaf(leaf) for leaf in tree.leaves]).value()
    generator_state = torch.get_rng_state()
    try:
        for index, layer in enumerate(layers):
            output = run_layer_on_meta(layer, run_layer, index, value)
            yield layer, value, output
            value = output
    finally:
        torch.set_rng_state(generator_state)
