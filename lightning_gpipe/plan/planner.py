"""Plans pipelines of a model: what fits, and how fast it will be, told without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.balance import check_layers, layer_costs, share_out
from lightning_gpipe.plan.chunks import decide_chunks, largest_micro_batch, micro_batches
from lightning_gpipe.plan.cost import LayerFlops, layer_flops
from lightning_gpipe.plan.memory import micro_batch_of
from lightning_gpipe.plan.model_memory import ModelMemory, partition_near
from lightning_gpipe.plan.plans import Plan, PlannedStage, Plans
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.timing import UntimableLayer
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import simulate
from lightning_gpipe.tensors.tree import Tree


@dataclass(frozen=True, slots=True)
class Choices:
    """What is compared: every combination that is possible.

    Args:
        stages: K.
        chunks: M; None: K, 2 K, 4 K and 8 K.
        virtual_stages: V.
        checkpoint: What is re-materialized.
    """

    stages: Sequence[int]
    chunks: Sequence[int] | None = None
    virtual_stages: Sequence[int] = (1, 2)
    checkpoint: Sequence[Checkpoint] = CHECKPOINT_MODES

    @classmethod
    def around(cls, settings: Settings, devices: int) -> Choices:
        """What to compare where the user has chosen some: what is chosen stays.

        Args:
            settings: What was chosen.
            devices: Of which stages are all, a half, or a quarter, if that isn't chosen.
        """
        stages = [devices // d for d in (1, 2, 4) if devices % d == 0]
        chunks = None if settings.chunks == "auto" else [settings.chunks]
        virtual = (1, 2) if settings.virtual_stages == 1 else (settings.virtual_stages,)
        is_chosen = settings.checkpoint not in CHECKPOINT_MODES
        return cls(
            stages if settings.stages == "auto" else [settings.stages],
            chunks,
            virtual,
            (settings.checkpoint,) if is_chosen else CHECKPOINT_MODES,
        )

    def settings(self, settings: Settings) -> Iterator[Settings]:
        """Every combination, with what isn't compared as it is in the given ones."""
        for k in dict.fromkeys(self.stages):
            for m in dict.fromkeys(self.chunks or [k, 2 * k, 4 * k, 8 * k]):
                for v in dict.fromkeys(self.virtual_stages):
                    if v > 1 and (k == 1 or m < k) and len(self.virtual_stages) > 1:
                        continue  # brings nothing
                    for mode in dict.fromkeys(self.checkpoint):
                        yield replace(
                            settings, stages=k, chunks=m, virtual_stages=v, checkpoint=mode
                        )


@dataclass(slots=True)
class Planner:
    """Plans pipelines of one model; it stays as it is, and nothing is computed.

    What layers hold is looked at once for each size of micro-batches, their operations once.

    Args:
        module: The whole model, on any device, the meta device too.
        backbone: Dotted name of its backbone.
        layers: The backbone's.
        run_layer: Runs one of them.
        sample: The backbone's input, a mini-batch.
        optimizers: That will step; None: not known.
        device: On which stages will be.
        is_detached: See :meth:`ModelMemory.of`.
        rate: Operations that a device does in a second; None: not known.
    """

    module: nn.Module
    backbone: str
    layers: Sequence[nn.Module]
    run_layer: RunLayer
    sample: Any
    optimizers: Sequence[Optimizer] | None
    device: torch.device
    is_detached: bool = False
    rate: float | None = None
    _memories: dict[str, ModelMemory] = field(default_factory=dict)
    _flops: list[LayerFlops] | None = None
    _costs: dict[bool, tuple[list[float], str]] = field(default_factory=dict)

    def compare(
        self,
        choices: Choices,
        settings: Settings,
        devices: int,
        warn: Callable[[str], object],
    ) -> Plans:
        """Plan all that is possible of some choices.

        Args:
            choices: What is compared.
            settings: The rest, with the memory of a device as ``memory_limit``.
            devices: In all; K divides them, and the others are replicas.
            warn: Called with a text where something isn't known.

        Raises:
            ValueError: If nothing is possible, with the reason.
            UntraceableLayer: If a layer needs the values of its input.
        """
        found: dict[tuple[Any, ...], Plan] = {}
        reason = f"no number of stages in {list(choices.stages)} divides {devices} devices"
        for each in choices.settings(settings):
            stages = int(each.stages)
            if devices % stages:
                continue
            try:
                check_layers(len(self.layers), stages, each, self.backbone)
            except ValueError as error:
                reason = str(error)
                continue
            if choices.chunks is None:  # no more than a run with chunks="auto" takes
                body, auto = self.module.get_submodule(self.backbone), replace(each, chunks="auto")
                chunks = decide_chunks(int(each.chunks), auto, body, self.sample, warn)
                each = replace(each, chunks=chunks)
            count = micro_batches(int(each.chunks), self.sample)
            key = stages, count, each.virtual_stages, each.checkpoint
            if key not in found:
                found[key] = self.plan(each, devices // stages, warn)
        if not found:
            raise ValueError(f"Nothing can be planned: {reason}")
        return Plans.of(list(found.values()))

    def plan(
        self, settings: Settings, replicas: int = 1, warn: Callable[[str], object] = str
    ) -> Plan:
        """Plan one layout.

        Args:
            settings: With numbers of stages and chunks.
            replicas: D.
            warn: Called with a text where something isn't known.
        """
        stages = int(settings.stages)
        body = self.module.get_submodule(self.backbone)
        chunks = 4 * stages if settings.chunks == "auto" else settings.chunks
        chunks = decide_chunks(chunks, settings, body, self.sample, warn)
        count = micro_batches(chunks, self.sample)
        memory = self._memory(chunks)
        partition, expected = partition_near(
            partial(self._partition, settings, stages, warn),
            *(memory, settings, stages, count, replicas),
        )
        costs = self._costs_of(partition, count)
        placement = rounds(stages, settings.virtual_stages)
        # as a run makes it before it has measured anything
        shares = Costs.of([max(share, 1e-3) for share in partition.part_shares])
        schedule = Schedules(settings, placement, replicas, shares).make(count)
        simulation = simulate(schedule, costs)
        rows = zip(partition.stages, expected.most, partition.shares, strict=True)
        return Plan(
            settings,
            self.backbone,
            tuple(PlannedStage(p, self._parameters(p), held, share) for p, held, share in rows),
            replicas,
            count,
            largest_micro_batch(chunks, self.sample),
            simulation.bubble,
            simulation.length,
            self.rate,
            count * _crossing(memory, partition, placement),
            sum(tensor.nbytes for tensor in memory.outside),
        )

    def _memory(self, chunks: int) -> ModelMemory:
        """What the model holds with micro-batches of one size."""
        given = Tree.of(micro_batch_of(self.sample, chunks), "The backbone's input").leaves
        key = str([tuple(x.shape) if isinstance(x, Tensor) else x for x in given])
        if key not in self._memories:
            body = self.module.get_submodule(self.backbone)
            self._memories[key] = ModelMemory.of(
                *(self.module, body, self.layers, self.run_layer, self.sample, chunks),
                *(self.optimizers, self.device, self.is_detached),
            )
        return self._memories[key]

    def _partition(
        self,
        settings: Settings,
        stages: int,
        warn: Callable[[str], object],
        memories: Sequence[float] | None,
        limit: float | None,
    ) -> Partition:
        key = settings.recomputes
        if settings.balance == "memory" or key not in self._costs:
            arguments = (self.layers, self.run_layer, settings, self.sample, _untimed, warn)
            self._costs[key] = layer_costs(*arguments, memories)
        return share_out(*self._costs[key], stages, settings, memories, limit)

    def _costs_of(self, partition: Partition, count: int) -> Costs:
        """Operations of each virtual stage for one of so many micro-batches."""
        if self._flops is None:
            self._flops = layer_flops(self.layers, self.run_layer, self.sample)
        parts = [[self._flops[i] for i in layers] for layers in partition.parts]
        return Costs.of(
            [sum(layer.forward for layer in part) / count for part in parts],
            [sum(layer.backward for layer in part) / count for part in parts],
            [sum(layer.recompute for layer in part) / count for part in parts],
        )

    def _parameters(self, parts: tuple[range, ...]) -> int:
        own = {id(p): p for part in parts for i in part for p in self.layers[i].parameters()}
        return sum(p.numel() for p in own.values())


def _untimed() -> list[float]:
    raise UntimableLayer("a plan computes nothing")


def _crossing(memory: ModelMemory, partition: Partition, placement: Sequence[int]) -> int:
    """Bytes that cross between stages for one micro-batch, forward and back."""
    crossing = 0
    for part, layers in enumerate(partition.parts[:-1]):
        if placement[part] != placement[part + 1]:
            between = memory.layers[layers[-1]].output
            crossing += between.nbytes + between.gradient
    return crossing
