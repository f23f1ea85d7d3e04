"""Decides which layers each stage runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.cost import (
    LayerCost,
    function_costs,
    layer_flops,
    module_flops,
    parameter_costs,
    step_costs,
)
from lightning_gpipe.plan.cut import LimitTooLow, cut
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.timing import UntimableLayer


@dataclass(slots=True)
class Balancing:
    """Shares the layers of a backbone out between stages, as often as it takes.

    What the layers cost is looked at once, but for ``balance="memory"``.

    Args:
        layers: The backbone's.
        run_layer: Runs one of them.
        sample: The backbone's input, if ``settings.needs_input``.
        measure: Measures what each layer takes.
        warn: Called with a text if the layers can't be balanced as the user chose.
    """

    layers: Sequence[nn.Module]
    run_layer: RunLayer
    sample: Any
    measure: Callable[[], Sequence[LayerCost]]
    warn: Callable[[str], object]
    _times: Sequence[LayerCost] | None = None
    _flops: Sequence[LayerCost] | None = None
    _known: dict[bool, tuple[list[float], str]] = field(default_factory=dict)

    def partition(
        self,
        stages: int,
        settings: Settings,
        memories: Sequence[float] | None = None,
        limit: float | None = None,
    ) -> Partition:
        """Share the layers out.

        With V virtual stages every one of them keeps within 1/V of the limit, so that the V of a
        stage keep within it together.

        Args:
            stages: K.
            settings: What the user chose.
            memories: Bytes of each layer.
            limit: The most bytes that a stage's layers may hold together. An explicit list of
                layers is taken as it is.

        Raises:
            ValueError: If the user's cost function returns no finite number from 0, or no cut
                keeps every stage within the limit.
            UntraceableLayer: If the user's cost function needs the input of a layer that can't run
                without data.
        """
        virtual = settings.virtual_stages
        if stages * virtual == 1 and settings.balance in ("flops", "time"):  # nothing is shared out
            costs, unit = parameter_costs(self.layers), "params"
        else:
            costs, unit = self._costs(settings, memories)
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

    def picked(self, order: Sequence[int]) -> Balancing:
        """What shares out a choice of these layers, some several times; they cost the same.

        Args:
            order: Their places, one after another. What they cost must have been looked at.
        """
        return replace(
            self,
            layers=[self.layers[i] for i in order],
            _times=None if self._times is None else [self._times[i] for i in order],
            _flops=None if self._flops is None else [self._flops[i] for i in order],
            _known={
                recomputes: ([costs[i] for i in order], unit)
                for recomputes, (costs, unit) in self._known.items()
            },
        )

    def times(self) -> Sequence[LayerCost]:
        """What each layer takes.

        Raises:
            UntimableLayer: If a layer can't run by itself, in a copy.
        """
        if self._times is None:
            self._times = self.measure()
        return self._times

    def flops(self) -> Sequence[LayerCost]:
        """The operations of each layer.

        Raises:
            UntraceableLayer: If a layer needs the values of its input.
        """
        if self._flops is None:
            self._flops = layer_flops(self.layers, self.run_layer, self.sample)
        return self._flops

    def _costs(
        self, settings: Settings, memories: Sequence[float] | None
    ) -> tuple[list[float], str]:
        """What each layer costs, and in which unit."""
        if settings.balance == "memory" and memories is not None:
            return list(memories), "memory"
        if settings.recomputes not in self._known:
            self._known[settings.recomputes] = self._looked_at(settings)
        return self._known[settings.recomputes]

    def _looked_at(self, settings: Settings) -> tuple[list[float], str]:
        balance = None if settings.sizes is not None else settings.balance
        if balance == "time":
            try:
                return step_costs(self.times(), settings.recomputes), "time"
            except UntimableLayer as error:
                balance = "flops"
                self.warn(
                    "Layers are balanced by operations: they can't be timed, because"
                    f" {error}. Choose balance='flops' or a list of layers per stage to silence"
                    " this."
                )
        if balance == "flops":
            try:
                return step_costs(self.flops(), settings.recomputes), "flops"
            except UntraceableLayer as error:
                self.warn(
                    "Layers are balanced by parameters: their operations can't be counted, because"
                    f" {error}. Choose balance='params' or a list of layers per stage to silence"
                    " this."
                )
        elif callable(balance):
            return function_costs(self.layers, self.run_layer, self.sample, balance), "cost"
        return parameter_costs(self.layers), "params"


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
