"""What a model holds, to be combined for any number of stages and micro-batches' order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.chunks import largest_micro_batch, micro_batch_of
from lightning_gpipe.plan.memory import (
    HeldTensor,
    LayerMemory,
    held_tensors,
    layer_memories,
)
from lightning_gpipe.plan.optimizer_state import optimizer_state_bytes
from lightning_gpipe.plan.schedules import HELD_OF_KEPT, Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.stage_memory import StageMemory, stage_memories
from lightning_gpipe.plan.step_memory import SeenStep, StepMemory
from lightning_gpipe.schedule.checkpoint import recomputed
from lightning_gpipe.tensors.microbatch import batch_leaf
from lightning_gpipe.tensors.tree import Tree

#: What the first and the last stage hold outside the backbone.
Ends: TypeAlias = tuple[tuple[HeldTensor, ...], tuple[HeldTensor, ...]]


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """What each stage is expected to hold in training.

    Args:
        in_step: In a step as most are.
        in_first_step: In one whose shapes are new.
    """

    in_step: tuple[StageMemory, ...]
    in_first_step: tuple[StageMemory, ...]

    @property
    def most(self) -> tuple[StageMemory, ...]:
        """For each stage the step in which it holds more."""
        pairs = zip(self.in_step, self.in_first_step, strict=True)
        return tuple(max(pair, key=lambda memory: memory.total) for pair in pairs)

    @property
    def highest(self) -> int:
        """Bytes of the stage that holds the most."""
        return max(memory.total for memory in self.most)

    def beyond(self, limit: int) -> int:
        """Bytes that stages hold beyond a limit, together."""
        return sum(max(0, memory.total - limit) for memory in self.most)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model holds, for one size of micro-batches.

    Args:
        layers: What each layer of the backbone holds.
        outside: Parameters and buffers outside the backbone.
        ends: Those of them that the first and the last stage need with ``step="micro-batch"``;
            None: it isn't known before the first step, and nothing outside is counted.
        everywhere: Those that all stages hold then, whoever needs them.
        step: What a mini-batch of the user's step holds outside the backbone; None: not known.
        part: The largest micro-batch's share of the mini-batch, 0 to 1.
    """

    layers: tuple[LayerMemory, ...]
    outside: tuple[HeldTensor, ...]
    ends: Ends | None = None
    everywhere: tuple[HeldTensor, ...] = ()
    step: StepMemory | None = None
    part: float = 1.0

    @classmethod
    def of(
        cls,
        module: nn.Module,
        body: nn.Module,
        layers: Sequence[nn.Module],
        run_layer: RunLayer,
        sample: Any,
        chunks: int,
        optimizers: Sequence[Optimizer] | None,
        device: torch.device,
        is_detached: bool = False,
    ) -> ModelMemory:
        """Look at a model once; it stays as it is, and nothing is computed.

        Args:
            module: The whole of it.
            body: Its backbone.
            layers: The backbone's layers.
            run_layer: Runs one of them.
            sample: The backbone's input, a mini-batch.
            chunks: M.
            optimizers: That will step; None: not known.
            device: On which stages will be.
            is_detached: Whether the input was computed without gradients, so that it doesn't tell
                whether it will want one: it will, if parameters outside the backbone do.

        Raises:
            UntraceableLayer: If a layer needs the values of its input.
        """
        states = None if optimizers is None else optimizer_state_bytes(optimizers)
        inside = {id(part) for part in body.modules()}
        outside = [part for part in module.modules() if id(part) not in inside]
        held = held_tensors(outside, states)
        micro_batch = _first_of(sample, chunks, layers, run_layer)
        if is_detached and any(tensor.gradient for tensor in held):
            micro_batch = tree_map_only(
                Tensor,
                lambda t: t.detach().requires_grad_() if t.is_floating_point() else t,
                micro_batch,
            )
        part = (largest_micro_batch(chunks, sample) or 1) / (largest_micro_batch(1, sample) or 1)
        layers_held = layer_memories(layers, run_layer, micro_batch, states, device)
        return cls(layers_held, held, part=part)

    def with_step(self, seen: SeenStep | None) -> ModelMemory:
        """The same, with what was seen of the user's step.

        Args:
            seen: None: nothing, so that both ends are thought to need all that is outside.
        """
        inside = {tensor.key for layer in self.layers for tensor in layer.tensors}
        outside = first = last = self.outside
        needed = frozenset(tensor.key for tensor in outside)
        if seen is not None:
            needed = seen.before | seen.behind | inside
            outside = tuple(t if t.key in needed else t.unused() for t in outside)
            first = tuple(t for t in outside if t.key in seen.before)
            last = tuple(t for t in outside if t.key in seen.behind)
        # which a run leaves everywhere: buffers, weights that layers have, too, what isn't used
        stay = tuple(t for t in outside if t.is_buffer or t.key in inside or t.key not in needed)
        step = None if seen is None else seen.memory
        return replace(self, outside=outside, ends=(first, last), everywhere=stay, step=step)

    def of_stages(
        self,
        partition: Partition,
        settings: Settings,
        micro_batches: int,
        replicas: int = 1,
        is_first: bool = False,
    ) -> tuple[StageMemory, ...]:
        """What each stage will hold; see :func:`stage_memories`.

        Args:
            partition: Which layers each stage has.
            settings: The schedule, and what is re-materialized.
            micro_batches: M.
            replicas: D.
            is_first: Whether it is a mini-batch whose shapes are new.
        """
        schedules = Schedules.unmeasured(settings, partition, replicas)
        is_uneven = self.part * micro_batches > 1 + 1e-6  # so the last one looks otherwise
        new = [0, micro_batches - 1 if is_uneven else 0] if is_first else []
        schedule = schedules.make(micro_batches, new=frozenset(new))
        is_whole_batch = settings.step == "mini-batch"
        common = self.outside if is_whole_batch else self.everywhere
        outside = dict.fromkeys(range(partition.count), common)
        if not is_whole_batch and self.ends is not None:
            first, last = self.ends
            outside[0] = (*first, *common)
            outside[partition.count - 1] = (*last, *common) if partition.count > 1 else self.outside
        step = self.step
        if step is not None and not is_whole_batch:
            step = step.share(self.part)
        return stage_memories(
            *(self.layers, partition.sizes, schedule, is_whole_batch, outside, step),
            sharing=replicas if settings.shard_optimizer_state else 1,
        )

    def expected(
        self, partition: Partition, settings: Settings, micro_batches: int, replicas: int = 1
    ) -> ExpectedMemory:
        """What each stage will hold in all kinds of steps; see :meth:`of_stages`."""
        in_step = self.of_stages(partition, settings, micro_batches, replicas)
        if settings.step == "mini-batch":  # whose schedule is always the same
            return ExpectedMemory(in_step, in_step)
        first = self.of_stages(partition, settings, micro_batches, replicas, is_first=True)
        if self.step is not None:  # all stages look for the backbone's input, a mini-batch of it
            first = tuple(memory.with_at_least(self.step.first) for memory in first)
        return ExpectedMemory(in_step, first)

    def of_layers(self, settings: Settings, stages: int, micro_batches: int) -> list[float]:
        """What each layer adds to its stage, in bytes, roughly: it depends on the stage.

        Its parameters, gradients and optimizer state, and the activations of as many micro-batches
        as the schedule keeps on the stage that keeps the most, at least of one. Inputs of stages
        are left out, since every layer may or may not begin one.

        Args:
            settings: The schedule, and what is re-materialized.
            stages: K.
            micro_batches: M.
        """
        kept = micro_batches - recomputed(settings.recomputing, micro_batches)
        if settings.step == "micro-batch" and settings.schedule != "fill_drain":
            share = 1.0 if settings.schedule in ("1f1b", "interleaved") else HELD_OF_KEPT
            kept = min(kept, math.ceil(share * stages))
        found, known, saved = [], set[int](), set[int]()
        for layer in self.layers:
            own = [t for t in layer.tensors if t.key not in known]
            activations = sum(n for key, n in layer.saved.items() if key not in saved)
            known.update(t.key for t in own)
            saved.update(layer.saved)
            held = sum(t.nbytes + t.gradient + t.copy + (t.optimizer or 0) for t in own)
            found.append(float(held + max(kept, 1) * activations))
        return found


def _first_of(sample: Any, chunks: int, layers: Sequence[nn.Module], run_layer: RunLayer) -> Any:
    """The first micro-batch of an input; all of it where it has no batch."""
    batch = Tree.of(sample, "The backbone's input")
    if batch_leaf(batch) is None:
        return sample
    try:
        return micro_batch_of(batch, chunks, layers, run_layer).value()
    except ValueError as error:
        raise UntraceableLayer(f"the input can't be split ({error})") from error


def human_bytes(count: float) -> str:
    """Bytes as people write them: 950 B, 1.2 kB, 25.6 MB, 1.1 GB."""
    return scaled(count, ["B", "kB", "MB", "GB", "TB"])


def scaled(count: float, units: Sequence[str]) -> str:
    """A number in the first unit, whole, or in a later one that is a thousand times the last."""
    power = 0
    while round(count, 1) >= 1000 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{min(power, 1)}f} {units[power]}"
