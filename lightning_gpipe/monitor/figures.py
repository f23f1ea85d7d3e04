"""What a pipeline is judged by: bubble, work and waits of its stages, throughput."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_gpipe.monitor.rank_report import Batch, RankReport
from lightning_gpipe.schedule.actions import Schedule
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class StageFigures:
    """Figures of a stage, the mean of its replicas.

    Args:
        busy_s: Seconds of work in a mini-batch, the middle one.
        wait_s: Seconds for which its actions waited for messages.
        peak_bytes: The most memory that it has held so far, on any replica.
    """

    busy_s: float
    wait_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some mini-batches.

    Args:
        batches: Their number.
        bubble: Share of the time that stages don't work in while the pipeline runs, 0 to 1.
        expected_bubble: The same by the schedule's simulation with what actions took; None: it
            can't be told.
        batch_s: Seconds from a mini-batch's end to the next one's, the middle one.
        samples_per_s: Samples that all replicas trained on in a second.
        stages: Those of each stage.
    """

    batches: int
    bubble: float
    expected_bubble: float | None
    batch_s: float
    samples_per_s: float
    stages: tuple[StageFigures, ...]

    @property
    def imbalance(self) -> float:
        """By which share of the mean the stage with the most work has more than that."""
        busy = [stage.busy_s for stage in self.stages]
        mean = statistics.mean(busy)
        return max(busy) / mean - 1 if mean else 0.0

    def metrics(self) -> dict[str, float]:
        """For loggers."""
        found = {
            "pipeline/bubble": self.bubble,
            "pipeline/imbalance": self.imbalance,
            "pipeline/batch_s": self.batch_s,
            "pipeline/samples_per_s": self.samples_per_s,
        }
        if self.expected_bubble is not None:
            found["pipeline/expected_bubble"] = self.expected_bubble
        for k, stage in enumerate(self.stages):
            found[f"pipeline/stage_{k}/busy_s"] = stage.busy_s
            found[f"pipeline/stage_{k}/wait_s"] = stage.wait_s
            found[f"pipeline/stage_{k}/peak_memory_bytes"] = float(stage.peak_bytes)
        return found

    def joined(self, before: Figures | None) -> Figures:
        """The mean of these and those of the mini-batches before, by their numbers."""
        if before is None:
            return self
        first, second = before, self
        share = first.batches / (first.batches + second.batches)

        def mean(a: float, b: float) -> float:
            return share * a + (1 - share) * b

        expected = first.expected_bubble, second.expected_bubble
        known = [bubble for bubble in expected if bubble is not None]
        return Figures(
            first.batches + second.batches,
            mean(first.bubble, second.bubble),
            mean(known[0], known[-1]) if known else None,
            mean(first.batch_s, second.batch_s),
            mean(first.samples_per_s, second.samples_per_s),
            tuple(
                StageFigures(
                    mean(a.busy_s, b.busy_s),
                    mean(a.wait_s, b.wait_s),
                    max(a.peak_bytes, b.peak_bytes),
                )
                for a, b in zip(first.stages, second.stages, strict=True)
            ),
        )


def figures(
    replicas: Sequence[Sequence[RankReport]], placement: tuple[int, ...], message_s: float
) -> Figures:
    """Make figures of what all ranks have told.

    Args:
        replicas: Of every replica what each of its stages tells.
        placement: For each virtual stage its rank.
        message_s: Seconds that a message takes.
    """
    count = len(replicas[0][0].batches)
    bubbles = [
        _bubble([rank.batches[b] for rank in ranks]) for ranks in replicas for b in range(count)
    ]
    expected = [_expected(ranks, placement, message_s) for ranks in replicas]
    known = [bubble for bubble in expected if bubble is not None]
    firsts = [ranks[0].batches for ranks in replicas]
    rates = [sum(b.samples for b in row) / max(sum(b.seconds for b in row), 1e-9) for row in firsts]
    return Figures(
        count,
        statistics.median(bubbles),
        statistics.mean(known) if known else None,
        statistics.median(batch.seconds for row in firsts for batch in row),
        sum(rates),
        tuple(
            StageFigures(
                statistics.mean(_middle(rank, _busy) for rank in ranks),
                statistics.mean(_middle(rank, _wait) for rank in ranks),
                max(rank.peak_bytes for rank in ranks),
            )
            for ranks in zip(*replicas, strict=True)
        ),
    )


def _middle(rank: RankReport, of: Callable[[Batch], float]) -> float:
    return statistics.median(of(batch) for batch in rank.batches)


def _busy(batch: Batch) -> float:
    return sum(section.busy_s for section in batch.sections.values())


def _wait(batch: Batch) -> float:
    return sum(section.wait_s for section in batch.sections.values())


def _bubble(batches: Sequence[Batch]) -> float:
    """Share of the time of a mini-batch's sections in which its stages don't work.

    Args:
        batches: The mini-batch on every rank of a pipeline.
    """
    length = 0.0
    for i in {i for batch in batches for i in batch.sections}:
        rows = [batch.sections[i] for batch in batches if i in batch.sections]
        length += max(row.end for row in rows) - min(row.start for row in rows)
    busy = sum(map(_busy, batches))
    return max(1 - busy / (length * len(batches)), 0.0) if length else 0.0


def _expected(
    ranks: Sequence[RankReport], placement: tuple[int, ...], message_s: float
) -> float | None:
    """The bubble of the programs that the ranks of a pipeline ran last."""
    times = {key: time for rank in ranks for key, time in (rank.times or {}).items()}
    costs = Costs.measured(times, len(placement), message_s)
    programs = [rank.programs or {} for rank in ranks]
    length = busy = 0.0
    for i in {i for found in programs for i in found}:
        schedule = Schedule(tuple(found.get(i, ()) for found in programs), placement)
        try:
            simulation = simulate(schedule, costs)
        except ValueError:  # a part of a schedule; what is only shown must not end a run
            return None
        length += simulation.length
        busy += (1 - simulation.bubble) * simulation.length
    return 1 - busy / length if length else None
