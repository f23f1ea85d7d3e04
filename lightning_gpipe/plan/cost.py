"""What each layer of a backbone costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.model.alike import signature
from lightning_gpipe.model.layer_state import state_kept_in_pass
from lightning_gpipe.model.on_meta import (
    graph_leaf_on_meta,
    meta_tensors,
    run_layer_on_meta,
    run_on_meta,
)
from lightning_gpipe.model.parameters import parameter_count
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.schedule.costs import BACKWARD_RATIO
from lightning_gpipe.tensors.tree import Tree

CostFunction: TypeAlias = Callable[[nn.Module, Any], float]
Balance: TypeAlias = Literal["flops", "params", "memory", "time"] | Sequence[int] | CostFunction


def parameter_costs(layers: Sequence[nn.Module]) -> list[float]:
    """Number of parameters of each layer."""
    return [float(parameter_count([layer])) for layer in layers]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer takes in a training step, in operations or in seconds.

    Args:
        forward: In its forward.
        backward: In its backward; 0 where there is none.
        recompute: In a forward that is run again; 0 where there is no backward.
    """

    forward: float
    backward: float
    recompute: float


def step_costs(costs: Sequence[LayerCost], recomputes: bool) -> list[float]:
    """What each layer takes in a training step altogether.

    Args:
        costs: Of the layers.
        recomputes: Whether activations are re-materialized.
    """
    return [c.forward + (c.backward + (c.recompute if recomputes else 0.0)) for c in costs]


def layer_flops(layers: Sequence[nn.Module], run_layer: RunLayer, sample: Any) -> list[LayerCost]:
    """Floating-point operations of each layer.

    Matrix products, convolutions and attention count their operations, everything else one
    operation per element that comes out, so that no layer is free. Frozen layers count what their
    backward computes: nothing before the first trainable one, no gradient of weights behind it.
    Of layers that do the same one is looked at.

    Args:
        layers: The layers, on any device; nothing is computed and no memory used.
        run_layer: Runs one of them.
        sample: The input of the first layer, a pytree of tensors ``[batch, …]``.

    Raises:
        UntraceableLayer: If a layer needs the values of its input.
    """
    found, known = [], dict[Hashable, tuple[LayerCost, Tree]]()
    value = Tree.of(sample, "The backbone's input").mapped(graph_leaf_on_meta).value()
    counter = FlopCounterMode(display=False)
    with state_kept_in_pass(layers), counter, torch.enable_grad():
        for index, layer in enumerate(layers):
            given = Tree.of(value, "A layer's input")
            key = signature(layer, run_layer, index, given)
            if key is None or key not in known:
                flops, output = _counted(layer, run_layer, index, given, counter)
                if key is not None:
                    known[key] = flops, output
            else:
                flops, output = known[key]
            found.append(flops)
            value = output.mapped(graph_leaf_on_meta).value()
    return found


def _counted(
    layer: nn.Module, run_layer: RunLayer, index: int, given: Tree, counter: FlopCounterMode
) -> tuple[LayerCost, Tree]:
    """A layer's operations, and its output."""
    tensors, start = meta_tensors(layer), counter.get_total_flops()
    forward, backward = 0.0, 0.0

    def run(index: int, layer: Callable[..., Any], value: Any) -> Any:
        nonlocal forward, backward
        result = run_layer(index, layer, value)
        output = Tree.of(result, "A layer's output")
        elements = sum(t.numel() for t in output.tensors())
        forward = float(counter.get_total_flops() - start + elements)
        if any(t.requires_grad for t in output.tensors()):
            try:  # here, because it may run the layer once more
                _differentiate(output, [*given.tensors(), *tensors.values()])
                backward = counter.get_total_flops() - start - forward + 2 * elements
            except Exception:  # PyTorch lacks some backwards on this device
                backward = BACKWARD_RATIO * forward
        return result

    # copies, because a layer may work in place, and not on leaves of the graph
    value = run_layer_on_meta(layer, run, index, given.mapped(Tensor.clone).value(), tensors)
    recompute = forward if backward else 0.0
    return LayerCost(forward, float(backward), recompute), Tree.of(value, "A layer's output")


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
        ValueError: If a cost is no number, not finite, or negative, or the function fails.
    """
    found, value = [], Tree.of(sample, "The backbone's input").mapped(graph_leaf_on_meta).value()
    for index, layer in enumerate(layers):
        try:
            each = cost(layer, value)
        except Exception as error:
            name = getattr(cost, "__qualname__", cost)
            raise ValueError(
                f"The balance function {name} of {cost.__module__} raised an error for layer"
                f" {index} ({type(layer).__name__}): {type(error).__name__}: {error}"
            ) from error
        found.append(_checked(each, layer, index))
        with torch.no_grad():
            value = run_layer_on_meta(layer, run_layer, index, value)
    return found


def _checked(cost: Any, layer: nn.Module, index: int) -> float:
    is_meta = isinstance(cost, Tensor) and cost.is_meta
    try:
        value = math.nan if is_meta else float(cost)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        found = "a tensor without a value (its input is on the meta device)" if is_meta else cost
        raise ValueError(
            f"The balance function must return a finite number from 0, got {found} for layer"
            f" {index} ({type(layer).__name__}): return a number computed from shapes, types and"
            " the layer's attributes."
        )
    return value


def module_flops(module: nn.Module, sample: Any) -> dict[str, float]:
    """Floating-point operations of every submodule by name, the whole module's under ``""``.

    Raises:
        UntraceableLayer: If the forward needs the values of its input.
    """
    named = sample if isinstance(sample, dict) else {}
    listed = sample if isinstance(sample, (tuple, list)) else () if named else (sample,)
    with FlopCounterMode(display=False) as counter:
        run_on_meta(module, *listed, **named)
    root = type(module).__name__
    counts = {name: float(sum(ops.values())) for name, ops in counter.get_flop_counts().items()}
    flops = {
        name.removeprefix(f"{root}."): count
        for name, count in counts.items()
        if name not in ("Global", root)
    }
    return {**flops, "": counts.get("Global", 0.0)}


def _differentiate(output: Tree, inputs: Sequence[Tensor]) -> None:
    roots = [t for t in output.tensors() if t.requires_grad]
    wanting = [t for t in inputs if t.requires_grad]
    torch.autograd.grad(roots, wanting, list(map(torch.ones_like, roots)), allow_unused=True)
