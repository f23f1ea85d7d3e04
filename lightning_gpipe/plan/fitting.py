"""Finds a cut, a number of micro-batches and a share of recompute whose stages fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.chunks import micro_batches
from lightning_gpipe.plan.model_memory import ExpectedMemory, ModelMemory, human_bytes
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.stage_memory import StageMemory
from lightning_gpipe.schedule.checkpoint import Checkpoint, recomputed
from lightning_gpipe.schedule.costs import BACKWARD_RATIO, Costs
from lightning_gpipe.schedule.simulate import simulate

_TRIES, _MOVES = 3, 16  # cuts that are tried to stay within a limit, and changes of the best
_HOPE = 2  # how many times as much a change may gain as the one before
#: Share of a device's memory that stages may fill: the rest is for kernels, and lost in gaps.
_USABLE = 0.9


@dataclass(frozen=True, slots=True)
class Fitted:
    """How a module is cut.

    Args:
        partition: Which layers each stage has.
        chunks: M.
        checkpoint: What is re-materialized.
        memory: What each stage is expected to hold; None: not known.
    """

    partition: Partition
    chunks: int
    checkpoint: Checkpoint
    memory: ExpectedMemory | None

    def fits(self, limit: int | None) -> bool:
        """Whether every stage stays within a limit, as far as it is known."""
        return self.memory is None or limit is None or self.memory.highest <= limit


@dataclass(frozen=True, slots=True)
class Fitting:
    """Cuts a backbone so that its stages fit in memory.

    Args:
        balancing: Shares its layers out.
        memory_of: Tells what the model holds with a given M; None: not known.
        sample: The backbone's input; None: not known.
        stages: K.
        replicas: D.
    """

    balancing: Balancing
    memory_of: Callable[[int], ModelMemory | None]
    sample: Any
    stages: int
    replicas: int

    def fit(self, settings: Settings, chunks: Sequence[int]) -> Fitted:
        """Take the first number of micro-batches with which the stages fit.

        With ``checkpoint="auto"`` as few of them are re-materialized as fit. Layers move to other
        stages for that only where a step then takes less time than with the recompute.

        Args:
            settings: What the user chose.
            chunks: The M that are possible.

        Returns:
            With the last M, if the stages fit with none; then all micro-batches are re-materialized
            that may be.

        Raises:
            ValueError: If the layers can't be cut at all.
        """
        for count in chunks:
            found = self._with_chunks(settings, count)
            if found.fits(settings.limit):
                break
        return found

    def _with_chunks(self, settings: Settings, chunks: int) -> Fitted:
        memory = self.memory_of(chunks)
        count = micro_batches(chunks, self.sample)
        each = replace(settings, checkpoint=settings.recomputing)
        partition, expected = self._cut(each, memory, count)
        found = Fitted(partition, chunks, each.recomputing, expected)
        if settings.checkpoint != "auto" or memory is None or not found.fits(settings.limit):
            return found
        is_moved = partition != self._balanced(each, memory, count)

        def as_it_is(checkpoint: Checkpoint) -> Fitted:
            each = replace(settings, checkpoint=checkpoint)
            cut = partition if is_moved else self._balanced(each, memory, count)
            expected = memory.expected(cut, each, count, self.replicas)
            return Fitted(cut, chunks, checkpoint, expected)

        found = _with_fewest(found, as_it_is, settings.limit, count)
        longest = max(found.partition.shares) * _work(found.checkpoint, count)

        def moved(checkpoint: Checkpoint) -> Fitted:
            each = replace(settings, checkpoint=checkpoint)
            slowest = longest / _work(checkpoint, count)
            cut, expected = self._cut(each, memory, count, slowest)
            return Fitted(cut, chunks, checkpoint, expected)

        other = _with_fewest(found, moved, settings.limit, count)
        return min(found, other, key=lambda cut: self._length(cut, settings, count))

    def _length(self, cut: Fitted, settings: Settings, count: int) -> float:
        """What a step takes, as far as the shares of the work tell."""
        each = replace(settings, checkpoint=cut.checkpoint)
        schedule = Schedules.unmeasured(each, cut.partition, self.replicas).make(count)
        return simulate(schedule, Costs.of(cut.partition.part_shares)).length

    def _cut(
        self,
        settings: Settings,
        memory: ModelMemory | None,
        count: int,
        slowest: float = math.inf,
    ) -> tuple[Partition, ExpectedMemory | None]:
        """Share the layers out within the limit; if no cut stays within it, the nearest found.

        What a stage holds besides its layers' sum, such as its inputs, isn't known before the cut:
        it is added to its first layer's, and the layers are cut anew. Then single layers move from
        the stage that holds the most to the next ones. A stage's share of the work stays below
        ``slowest``.
        """
        best = self._balanced(settings, memory, count)
        if memory is None:
            return best, None
        limit, layers = settings.limit, memory.of_layers(settings, self.stages, count)
        expected = memory.expected(best, settings, count, self.replicas)
        if limit is None or settings.sizes is not None:
            return best, expected
        partition, found, raised = best, expected, [*layers]
        for _ in range(_TRIES):
            if expected.highest <= limit:
                break
            for parts, held in zip(partition.stages, found.most, strict=True):
                besides = held.total - sum(layers[i] for part in parts for i in part)
                for first in (part[0] for part in parts):
                    raised[first] = max(raised[first], layers[first] + besides / len(parts))
            try:
                partition = self.balancing.partition(self.stages, settings, raised, limit)
            except ValueError:  # no cut at all
                break
            if max(partition.shares) >= slowest:
                break
            found = memory.expected(partition, settings, count, self.replicas)
            if found.highest < expected.highest:
                best, expected = partition, found
        gain = expected.beyond(limit)  # of a move, in bytes
        for left in range(_MOVES, 0, -1):
            beyond, kept = expected.beyond(limit), sum(m.kept for m in expected.most)
            if not beyond or kept > limit * self.stages or _HOPE * gain * left < beyond:
                break
            moved = [cut for cut in _moved(best, expected) if max(cut.shares) < slowest]
            if not moved:
                break
            tried = [(p, memory.expected(p, settings, count, self.replicas)) for p in moved]
            partition, found = min(tried, key=lambda pair: pair[1].beyond(limit))
            gain = beyond - found.beyond(limit)
            if gain <= 0:
                break
            best, expected = partition, found
        return best, expected

    def _balanced(self, settings: Settings, memory: ModelMemory | None, count: int) -> Partition:
        """Share the layers out without a limit."""
        layers = None if memory is None else memory.of_layers(settings, self.stages, count)
        return self.balancing.partition(self.stages, settings, layers)


def _with_fewest(
    found: Fitted, tried: Callable[[Checkpoint], Fitted], limit: int | None, count: int
) -> Fitted:
    """The same with as few of so many micro-batches re-materialized as fit, or what was found."""
    least, most = 1, recomputed(found.checkpoint, count)
    if most and (kept := tried("never")).fits(limit):
        return kept
    while least < most:
        middle = (least + most) // 2
        cut = tried(middle)
        if cut.fits(limit):
            found, most = cut, middle
        else:
            least = middle + 1
    return found


def _work(checkpoint: Checkpoint, count: int) -> float:
    """What a layer does for a micro-batch, on average: a forward is 1."""
    return 1 + BACKWARD_RATIO + recomputed(checkpoint, count) / count


def _moved(partition: Partition, expected: ExpectedMemory) -> list[Partition]:
    """Cuts with one layer less on the stage that holds the most."""
    found, totals = [], [memory.total for memory in expected.most]
    fullest = totals.index(max(totals))
    for part in range(fullest, len(partition.sizes), partition.count):
        for other in (part - 1, part + 1):
            sizes = [*partition.sizes]
            if sizes[part] > 1 and 0 <= other < len(sizes):
                sizes[part] -= 1
                sizes[other] += 1
                found.append(replace(partition, sizes=tuple(sizes)))
    return found


def usable_memory(device: torch.device) -> int | None:
    """Bytes of a device's memory that a stage may fill; None: not known, as in the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_USABLE * (free + torch.cuda.memory_reserved(device)))
    if device.type == "mps":
        return int(_USABLE * torch.mps.recommended_max_memory())
    return None


def check_limit(memories: Sequence[StageMemory], limit: int) -> None:
    """Check that every stage stays within a limit.

    Args:
        memories: What each stage will hold.
        limit: Bytes.

    Raises:
        ValueError: Naming the stage that holds the most, and what to change.
    """
    stage = max(range(len(memories)), key=lambda k: memories[k].total)
    most = memories[stage]
    if most.total <= limit:
        return
    raise ValueError(
        f"Stage {stage} is expected to hold {human_bytes(most.total)}, more than"
        f" memory_limit={human_bytes(limit)}: {human_bytes(most.kept)} of parameters, gradients and"
        f" optimizer state, {human_bytes(most.of_micro_batches)} of micro-batches. Use more"
        " stages, balance='memory', or, if they aren't used yet, smaller micro-batches (more"
        " chunks) and checkpoint='always'."
    )
