"""What is planned: one layout of a pipeline, and several that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpipe.plan.depth import Repeated
from lightning_gpipe.plan.model_memory import human_bytes
from lightning_gpipe.plan.report import human, layer_numbers, table_lines
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.stage_memory import StageMemory

#: Stages, and layouts, of which a table shows all.
_STAGES, _LAYOUTS = 16, 20


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a plan.

    Args:
        layers: Those that it runs: a range for each of its virtual stages.
        parameters: Their number, of its layers.
        memory: What it is expected to hold in training, in bytes.
        share: Of the cost by which layers are shared out, 0 to 1.
    """

    layers: tuple[range, ...]
    parameters: int
    memory: StageMemory
    share: float


@dataclass(frozen=True, slots=True)
class Depth:
    """How deep a model can be, by the block of layers that it repeats.

    Args:
        block: The block.
        most: How often it may come with every stage within the limit, as far as that was tried, up
            to 8192 layers; None: not even once for each stage.
    """

    block: Repeated
    most: int | None

    @property
    def is_exact(self) -> bool:
        """Whether no more would fit; else deeper models weren't tried."""
        return self.most is None or self.most < self.block.limit


@dataclass(frozen=True, slots=True)
class Plan:
    """What to expect of one layout of a pipeline.

    Args:
        settings: How it is laid out; K is ``settings.stages``.
        backbone: Dotted name of what is cut.
        stages: What each stage runs and holds.
        replicas: D, the pipelines that read different data.
        micro_batches: M, no more than there are samples.
        samples: In the largest micro-batch; None: the input has no batch.
        bubble: Share of the time in which stages wait, 0 to 1.
        length: What a step takes from its start to its end: floating-point operations as
            :func:`lightning_gpipe.plan.cost.layer_flops` counts them, or seconds if layers were
            measured.
        seconds: What a step takes; None: not known.
        sent: Bytes that cross between stages in a step, activations and gradients.
        depth: How deep the model can be with it; None: not known, or no block of layers repeats.
        is_measured: Whether layers were measured.
        counts_step: Whether memory is also that of what the step computes outside the backbone.
    """

    settings: Settings
    backbone: str
    stages: tuple[PlannedStage, ...]
    replicas: int
    micro_batches: int
    samples: int | None
    bubble: float
    length: float
    seconds: float | None
    sent: int
    depth: Depth | None = None
    is_measured: bool = False
    counts_step: bool = False

    @property
    def most(self) -> int:
        """Bytes of the stage that holds the most."""
        return max(stage.memory.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage stays within the memory of a device; without a limit it does."""
        return self.settings.limit is None or self.most <= self.settings.limit

    @property
    def length_per_batch(self) -> float:
        """The step's length by the mini-batches that it takes in, one each replica."""
        return self.length / self.replicas

    def __str__(self) -> str:
        """A table, a row a stage."""
        header = ["Stage", "Layers", "Parameters", "Weights", "Gradients", "Optimizer"]
        header += ["Boundaries", "Activations", "Total", "Share"]
        rows = [_stage_row(k, stage) for k, stage in enumerate(self.stages)]
        if len(rows) > _STAGES:
            largest = max(range(len(rows)), key=lambda k: self.stages[k].memory.total)
            shown = sorted({*range(4), largest, *range(len(rows) - 4, len(rows))})
            rows = [rows[k] for k in shown]
            header[0] += f" of {len(self.stages)}"
        s, layers = self.settings, sum(len(p) for stage in self.stages for p in stage.layers)
        of = "" if self.samples is None else f" of {self.samples} sample{'s' * (self.samples > 1)}"
        lines = [
            f"{layers} layers of '{self.backbone}' on {s.stages} stage{'s' * (s.stages != 1)}"
            f"{f' x {s.virtual_stages} virtual stages' * (s.virtual_stages > 1)}"
            f"{f' x {self.replicas} replicas' * (self.replicas > 1)},"
            f" {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}{of},"
            f" checkpoint={s.checkpoint}"
            f"{', step=micro-batch' * (s.step == 'micro-batch')}",
            *table_lines(header, rows),
            f"Bubble {self.bubble:.1%} of the time;{self._step()} stages send"
            f" {human_bytes(self.sent)} to each other in a step.{self._verdict()}",
            "Parameters: of layers. Weights: of these and of what else a stage holds.",
        ]
        return "\n".join([*lines, *self._depth(), *_notes([self])])

    def _depth(self) -> list[str]:
        if self.depth is None:
            return []
        block, most = self.depth.block, self.depth.most
        each = (
            f"layer {block.start}"
            if block.length == 1
            else (f"layers {block.start}-{block.start + block.length - 1}")
        )
        if most is None:
            fits = "not even one for every stage fits"
        else:
            fits = f"{'up to' if self.depth.is_exact else 'at least'} {most:,} fit"
        return [f"Largest depth: {each} and the like come {block.count:,} times; {fits}."]

    def _step(self) -> str:
        return "" if self.seconds is None else f" a step takes {self.seconds:.3g} s;"

    def _verdict(self) -> str:
        limit = self.settings.limit
        if limit is None:
            return ""
        if self.fits:
            return f" It fits in {human_bytes(limit)}."
        stage = max(range(len(self.stages)), key=lambda k: self.stages[k].memory.total)
        return f" It does not fit: stage {stage} holds more than {human_bytes(limit)}."


@dataclass(frozen=True, slots=True)
class Plans:
    """Layouts that are compared.

    Args:
        all: First those that fit, the fastest first; then the others, by what they hold.
    """

    all: tuple[Plan, ...]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Plans:
        """Put them in order. Of two that are as fast the one that holds less comes first."""

        def rank(plan: Plan) -> tuple[float, ...]:
            speed = plan.length_per_batch
            return (0, speed, plan.most) if plan.fits else (1, plan.most, speed)

        return cls(tuple(sorted(plans, key=rank)))

    @property
    def best(self) -> Plan | None:
        """The fastest of those that fit, or None if none does."""
        return self.all[0] if self.all[0].fits else None

    def __str__(self) -> str:
        """A table, a row a layout, the best first."""
        header = ["Stages", "Replicas", "Virtual", "Micro-batches", "Samples", "Checkpoint"]
        header += ["Memory", "Bubble", "Time", "Sent", "Fits"]
        fastest = min(plan.length_per_batch for plan in self.all)
        rows = [_layout_row(plan, fastest) for plan in self.all[:_LAYOUTS]]
        left = len(self.all) - len(rows)
        limit, fitting = self.all[0].settings.limit, sum(plan.fits for plan in self.all)
        by = "by what layers took alone" if self.all[0].is_measured else "by counted operations"
        unit = "; 1.00 x is the fastest of these" * (self.all[0].seconds is None)
        found = f"{fitting} of {len(self.all)} layouts fit in {human_bytes(limit or 0)} a device"
        return "\n".join(
            [
                *table_lines(header, rows),
                *([f"… and {left} more"] if left else []),
                *([f"{found}."] if limit is not None else []),
                "Memory: of the stage that holds the most. Time: of a step, by the mini-batches"
                f" that the replicas read in it, {by}, without messages{unit}.",
                *_notes(self.all),
            ]
        )


def _stage_row(number: int, stage: PlannedStage) -> list[str]:
    m = stage.memory
    state = "?" if m.optimizer is None else human_bytes(m.optimizer)
    between = m.inputs + m.messages + m.ends
    parts = (m.weights, m.gradients, state, between, m.activations, m.total)
    return [
        str(number),
        layer_numbers(stage.layers),
        human(stage.parameters),
        *(part if isinstance(part, str) else human_bytes(part) for part in parts),
        f"{stage.share:.1%}",
    ]


def _layout_row(plan: Plan, fastest: float) -> list[str]:
    s, time = plan.settings, f"{plan.length_per_batch / fastest:.2f} x"
    if plan.seconds is not None:
        time = f"{plan.seconds / plan.replicas:.3g} s"
    return [
        str(s.stages),
        str(plan.replicas),
        str(s.virtual_stages),
        str(plan.micro_batches),
        "?" if plan.samples is None else str(plan.samples),
        str(s.checkpoint),
        human_bytes(plan.most),
        f"{plan.bubble:.1%}",
        time,
        human_bytes(plan.sent),
        "yes" if plan.fits else "no",
    ]


def _notes(plans: Sequence[Plan]) -> list[str]:
    """Choices that were not to be had, and what isn't counted."""
    missing = []
    if not plans[0].counts_step:
        missing.append("what the step computes outside the backbone")
    if any(stage.memory.optimizer is None for stage in plans[0].stages):
        missing.append("the optimizer's state, which isn't known")
    notes = [f"Not counted: {'; '.join(missing)}."] if missing else []
    clipped = {int(p.settings.chunks): p.micro_batches for p in plans}
    fewer = [
        f"chunks={chunks}: a mini-batch of {samples} sample{'s' * (samples > 1)} makes {samples}."
        for chunks, samples in clipped.items()
        if samples < chunks
    ]
    return [*notes, *fewer]
