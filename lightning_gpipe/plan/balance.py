"""Decides which layers each stage runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.cost import flop_costs, function_costs, module_flops, parameter_costs
from lightning_gpipe.plan.cut import LimitTooLow, cut
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.timing import UntimableLayer


def decide_partition(
    layers: Sequence[nn.Module],
    run_layer: RunLayer,
    stages: int,
    settings: Settings,
    sample: Any,
    measure: Callable[[], list[float]],
    warn: Callable[[str], object],
    memories: Sequence[float] | None = None,
    limit: float | None = None,
) -> Partition:
    """Share the layers out between the stages.

    With V virtual stages every one of them keeps within 1/V of the limit, so that the V of a stage
    keep within it together.

    Args:
        layers: The backbone's.
        run_layer: Runs one of them.
        stages: K.
        settings: What the user chose.
        sample: The backbone's input, if ``settings.needs_input``.
        measure: Measures what each layer takes; see :func:`lightning_gpipe.plan.timing.time_costs`.
        warn: Called with a text if the layers can't be balanced as the user chose.
        memories: Bytes of each layer.
        limit: The most bytes that a stage's layers may hold together. An explicit list of layers
            is taken as it is.

    Raises:
        ValueError: If the user's cost function returns no finite number from 0, or no cut keeps
            every stage within the limit.
        UntraceableLayer: If the user's cost function needs the input of a layer that can't run
            without data.
    """
    costs, unit = layer_costs(layers, run_layer, settings, sample, measure, warn, memories)
    return share_out(costs, unit, stages, settings, memories, limit)


def layer_costs(
    layers: Sequence[nn.Module],
    run_layer: RunLayer,
    settings: Settings,
    sample: Any,
    measure: Callable[[], list[float]],
    warn: Callable[[str], object],
    memories: Sequence[float] | None = None,
) -> tuple[list[float], str]:
    """What each layer costs, and in which unit; see :func:`decide_partition`."""
    balance = settings.balance
    costs, unit = parameter_costs(layers), "params"
    if balance == "time":
        try:
            costs, unit = measure(), "time"
        except UntimableLayer as error:
            balance = "flops"
            warn(
                f"Layers are balanced by operations: they can't be timed, because {error}. Choose"
                " balance='flops' or a list of layers per stage to silence this."
            )
    if balance == "flops":
        try:
            costs, unit = flop_costs(layers, run_layer, sample, settings.recomputes), "flops"
        except UntraceableLayer as error:
            warn(
                "Layers are balanced by parameters: their operations can't be counted, because"
                f" {error}. Choose balance='params' or a list of layers per stage to silence this."
            )
    elif balance == "memory" and memories is not None:
        costs, unit = list(memories), "memory"
    elif callable(balance):
        costs, unit = function_costs(layers, run_layer, sample, balance), "cost"
    return costs, unit


def share_out(
    costs: Sequence[float],
    unit: str,
    stages: int,
    settings: Settings,
    memories: Sequence[float] | None = None,
    limit: float | None = None,
) -> Partition:
    """Share layers out by what they cost, or as the user lists them; see :func:`decide_partition`.

    Args:
        costs: Cost of each layer.
        unit: What the costs are.
        stages: See there, and so the rest.
        settings: See there.
        memories: See there.
        limit: See there.

    Raises:
        ValueError: If no cut keeps every stage within the limit.
    """
    virtual = settings.virtual_stages
    if settings.sizes is not None:
        return Partition(settings.sizes, tuple(costs), unit, virtual)
    try:
        each = None if limit is None else limit // virtual
        sizes = cut(costs, stages * virtual, memories, each)
    except LimitTooLow as error:
        if virtual == 1:
            raise
        raise ValueError(
            f"{error} These are virtual stages, {virtual} of each stage, and each may hold"
            f" 1/{virtual} of its limit: {virtual * error.least:,} bytes would do for a stage."
        ) from error
    return Partition(sizes, tuple(costs), unit, virtual)


def check_layers(layers: int, stages: int, settings: Settings, backbone: str) -> None:
    """Check that a backbone can be cut into so many stages.

    Args:
        layers: Number of its layers.
        stages: K.
        settings: What the user chose.
        backbone: Its dotted name.

    Raises:
        ValueError: With what to change.
    """
    virtual = settings.virtual_stages
    parts, each = stages * virtual, f" x {virtual} virtual stages" if virtual > 1 else ""
    if layers < stages:
        raise ValueError(
            f"The backbone '{backbone}' has {layers} layers, fewer than {stages} stages: use at"
            f" most {layers} devices, or split it into more layers."
        )
    if layers < parts:
        raise ValueError(
            f"The backbone '{backbone}' has {layers} layers, fewer than {stages} stages{each}: give"
            f" virtual_stages={layers // stages}, or split it into more layers."
        )
    sizes = settings.sizes
    if sizes is not None and (len(sizes) != parts or sum(sizes) != layers):
        raise ValueError(
            f"balance={list(sizes)} makes {len(sizes)} stages of {sum(sizes)} layers, but there are"
            f" {stages} stages{each} and '{backbone}' has {layers} layers: give {parts} numbers"
            f" that add up to {layers}."
        )


def known_flops(module: nn.Module) -> dict[str, float] | None:
    """Operations of every submodule by name, where the module has an example of its input."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return None
    try:
        return module_flops(module, example)
    except UntraceableLayer:
        return None
