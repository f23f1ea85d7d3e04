"""Plans pipelines of a model: what fits, and how fast it will be, told before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gpipe.model.parameters import parameter_count
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.balance import Balancing, check_layers
from lightning_gpipe.plan.chunks import (
    decide_chunks,
    largest_micro_batch,
    micro_batches,
    more_chunks,
)
from lightning_gpipe.plan.cost import LayerCost
from lightning_gpipe.plan.depth import Deeper, Repeated, deepest
from lightning_gpipe.plan.fitting import Fitted, Fitting
from lightning_gpipe.plan.model_memory import ExpectedMemory, ModelMemory
from lightning_gpipe.plan.plans import Depth, Plan, PlannedStage, Plans
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings, is_count
from lightning_gpipe.plan.step_memory import SeenStep
from lightning_gpipe.plan.timing import UntimableLayer
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint, recomputed
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Choices:
    """What is compared: every combination that is possible.

    Args:
        stages: K.
        chunks: M; None: K, 2 K, 4 K and 8 K.
        virtual_stages: V.
        checkpoint: What is re-materialized; ``"auto"``: as little as fits.

    Raises:
        ValueError: Naming the choice that isn't a list of what it may be.
    """

    stages: Sequence[int]
    chunks: Sequence[int] | None = None
    virtual_stages: Sequence[int] = (1, 2)
    checkpoint: Sequence[Checkpoint | Literal["auto"]] = CHECKPOINT_MODES

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "virtual_stages", "checkpoint"):
            values = getattr(self, name)
            if values is None:
                continue
            is_list = isinstance(values, Iterable) and not isinstance(values, str)
            listed = tuple(values) if is_list else ()
            if not listed:
                raise ValueError(
                    f"{name} must be a list of what is compared, got {name}={values!r}."
                )
            if name != "checkpoint" and not all(map(is_count, listed)):
                raise ValueError(f"{name} must be whole numbers from 1, got {name}={values!r}.")
            object.__setattr__(self, name, listed)

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
        modes: tuple[Checkpoint | Literal["auto"], ...] = CHECKPOINT_MODES
        if settings.limit is not None:
            modes = (*CHECKPOINT_MODES, "auto")
        is_chosen = settings.checkpoint not in CHECKPOINT_MODES
        return cls(
            stages if settings.stages == "auto" else [settings.stages],
            chunks,
            virtual,
            (settings.checkpoint,) if is_chosen else modes,
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
    """Plans pipelines of one model; it stays as it is.

    What layers hold is looked at once for each size of micro-batches, their operations once.

    Args:
        module: The whole model, on any device, the meta device too.
        backbone: Dotted name of its backbone.
        layers: The backbone's.
        run_layer: Runs one of them.
        sample: The backbone's input, a mini-batch.
        optimizers: That will step; None: not known.
        device: On which stages will be.
        warn: Called with a text where something isn't known.
        is_detached: See :meth:`ModelMemory.of`.
        seen: What was seen of the user's step; None: nothing, so that both ends of the pipeline are
            thought to hold all that is outside the backbone.
        rate: Operations that a device does in a second; None: not known.
        measure: Measures what each layer takes with so many micro-batches; None: nothing is
            computed.
    """

    module: nn.Module
    backbone: str
    layers: Sequence[nn.Module]
    run_layer: RunLayer
    sample: Any
    optimizers: Sequence[Optimizer] | None
    device: torch.device
    warn: Callable[[str], object]
    is_detached: bool = False
    seen: SeenStep | None = None
    rate: float | None = None
    measure: Callable[[int], Sequence[LayerCost]] | None = None
    _memories: dict[int | None, ModelMemory] = field(default_factory=dict)
    _times: dict[int, Sequence[LayerCost]] = field(default_factory=dict)
    _balancing: Balancing | None = None

    def compare(self, choices: Choices, settings: Settings, devices: int) -> Plans:
        """Plan all that is possible of some choices.

        Args:
            choices: What is compared.
            settings: The rest, with the memory of a device as ``memory_limit``.
            devices: In all; K divides them, and the others are replicas.

        Raises:
            ValueError: If nothing is possible, with the reason.
            UntraceableLayer: If a layer needs the values of its input.
        """
        found: dict[tuple[int, ...], Plan] = {}
        reasons: list[str] = []
        for each in self._different(choices.settings(settings), choices.chunks is None):
            stages = int(each.stages)
            if devices % stages:
                continue
            try:
                check_layers(len(self.layers), stages, each, self.backbone)
            except ValueError as error:
                reasons.append(str(error))
                continue
            plan = self.plan(each, devices // stages)
            again = recomputed(plan.settings.recomputing, plan.micro_batches)
            found.setdefault((stages, plan.micro_batches, each.virtual_stages, again), plan)
        if not found:
            undivided = f"no number of stages in {list(choices.stages)} divides {devices} devices"
            raise ValueError(f"Nothing can be planned: {[*reasons, undivided][0]}")
        plans = Plans.of(list(found.values()))
        return Plans((self._with_depth(plans.all[0]), *plans.all[1:]))

    def _different(self, all_settings: Iterator[Settings], is_auto: bool) -> Iterator[Settings]:
        """Those whose steps differ; with no more micro-batches than ``chunks="auto"`` takes."""
        counts: dict[int, int] = {}
        seen = set()
        for each in all_settings:
            chunks = int(each.chunks)
            if chunks not in counts:
                auto = replace(each, chunks="auto") if is_auto else each
                decided = decide_chunks(chunks, auto, self._body, self.sample, self.warn)
                counts[chunks] = micro_batches(decided, self.sample)
            key = (each.stages, counts[chunks], each.virtual_stages, each.checkpoint)
            if key not in seen:
                seen.add(key)
                yield replace(each, chunks=counts[chunks]) if is_auto else each

    def _with_depth(self, plan: Plan) -> Plan:
        """A plan that tells how often the model's repeated block may come."""
        settings, limit = plan.settings, plan.settings.limit
        memory, shares = self._memory(int(settings.chunks)), self._shares
        block = Repeated.find(memory.layers)
        if limit is None or settings.sizes is not None or block is None:
            return plan
        layers, least = len(self.layers), int(settings.stages) * settings.virtual_stages
        deeper = Deeper(block, memory.layers)

        def fits(count: int) -> bool:
            order = block.order(layers, count)
            if len(order) < least:  # there is no such cut, but it would be a smaller model
                return True
            deep = replace(memory, layers=deeper.layers(count))
            fitting = Fitting(
                shares.picked(order),
                lambda _: deep,
                self.sample,
                int(settings.stages),
                plan.replicas,
            )
            return fitting.fit(settings, [int(settings.chunks)]).fits(limit)

        most = deepest(block, fits)
        if most is not None and len(block.order(layers, most)) < least:
            most = None
        return replace(plan, depth=Depth(block, most))

    def plan(self, settings: Settings, replicas: int = 1) -> Plan:
        """Plan one layout.

        Args:
            settings: With a number of stages.
            replicas: D.
        """
        stages = int(settings.stages)
        chunks = 4 * stages if settings.chunks == "auto" else settings.chunks
        choices = [decide_chunks(chunks, settings, self._body, self.sample, self.warn)]
        if settings.chunks == "auto" and settings.limit is not None:
            choices = more_chunks(choices[0], self._body, self.sample)
        fitting = Fitting(self._shares, self._memory, self.sample, stages, replicas)
        fitted = fitting.fit(settings, choices)
        settings = replace(settings, chunks=fitted.chunks, checkpoint=fitted.checkpoint)
        return self._planned(settings, replicas, fitted)

    def _planned(self, settings: Settings, replicas: int, fitted: Fitted) -> Plan:
        partition, count = fitted.partition, micro_batches(fitted.chunks, self.sample)
        memory = self._memory(fitted.chunks)
        placement = rounds(partition.count, settings.virtual_stages)
        costs = self._costs_of(partition, fitted.chunks, count)  # a run measures them
        schedules = replace(Schedules.unmeasured(settings, partition, replicas), costs=costs)
        simulation = simulate(schedules.make(count), costs)
        held = cast(ExpectedMemory, fitted.memory).most  # or it was an error
        rows = zip(partition.stages, held, partition.shares, strict=True)
        seconds = None if self.rate is None else simulation.length / self.rate
        return Plan(
            settings,
            self.backbone,
            tuple(PlannedStage(p, self._parameters(p), m, share) for p, m, share in rows),
            replicas,
            count,
            largest_micro_batch(fitted.chunks, self.sample),
            simulation.bubble,
            simulation.length,
            seconds if self.measure is None else simulation.length,
            count * _crossing(memory, partition, placement),
            is_measured=self.measure is not None,
            counts_step=self.seen is not None and self.seen.memory is not None,
        )

    @property
    def _body(self) -> nn.Module:
        return self.module.get_submodule(self.backbone)

    @property
    def _shares(self) -> Balancing:
        """Shares the layers out."""
        if self._balancing is None:
            arguments = self.layers, self.run_layer, self.sample
            self._balancing = Balancing(*arguments, partial(self._timed, 1), self.warn)
        return self._balancing

    def _timed(self, chunks: int) -> Sequence[LayerCost]:
        if self.measure is None:
            raise UntimableLayer("a plan without measured times computes nothing")
        if chunks not in self._times:
            self._times[chunks] = self.measure(chunks)
        return self._times[chunks]

    def _memory(self, chunks: int) -> ModelMemory:
        """What the model holds with micro-batches of one size."""
        key = largest_micro_batch(chunks, self.sample)
        if key not in self._memories:
            found = ModelMemory.of(
                *(self.module, self._body, self.layers, self.run_layer, self.sample, chunks),
                *(self.optimizers, self.device, self.is_detached),
            )
            self._memories[key] = found.with_step(self.seen)
        return self._memories[key]

    def _costs_of(self, partition: Partition, chunks: int, count: int) -> Costs:
        """What each virtual stage takes for one of so many micro-batches."""
        if self.measure is None:  # operations of a mini-batch, else seconds of a micro-batch
            costs = self._shares.flops()
        else:
            costs, count = self._timed(chunks), 1

        def of_parts(kind: str) -> list[float]:
            return [sum(getattr(costs[i], kind) for i in p) / count for p in partition.parts]

        return Costs.of(of_parts("forward"), of_parts("backward"), of_parts("recompute"))

    def _parameters(self, parts: tuple[range, ...]) -> int:
        return parameter_count(self.layers[i] for part in parts for i in part)


def _crossing(memory: ModelMemory, partition: Partition, placement: Sequence[int]) -> int:
    """Bytes that cross between stages for one micro-batch, forward and back."""
    crossing = 0
    for part, layers in enumerate(partition.parts[:-1]):
        if placement[part] != placement[part + 1]:
            between = memory.layers[layers[-1]].output
            crossing += between.nbytes + between.gradient
    return crossing
