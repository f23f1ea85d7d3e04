"""The shortest step of a schedule, for what stages take without messages."""

from __future__ import annotations

import statistics

from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.placement import rounds as in_rounds
from lightning_gpipe.schedule.simulate import simulate
from tests.benchmarks.turns import Result


def bound_s(ideal: Result, stages: int, chunks: int, checkpoint: str) -> float:
    """The length of fill-drain.

    Args:
        ideal: What :func:`tests.benchmarks.contestants.plain.ideal` measured.
        stages: K.
        chunks: M.
        checkpoint: As the strategy's.
    """
    if ideal.error is not None:
        return float("nan")
    forward, backward = _times(ideal, stages, "F"), _times(ideal, stages, "B")
    recompute = _times(ideal, stages, "R") if checkpoint == "always" else forward
    schedule = fill_drain(in_rounds(stages), chunks, checkpoint)  # type: ignore[arg-type]
    return simulate(schedule, Costs.of(forward, backward, recompute)).length


def _times(ideal: Result, stages: int, kind: str) -> list[float]:
    """Of every stage the mean time of a kind of action in a round, the median of all rounds."""
    return [
        statistics.median(notes[rank][kind][0] for notes in ideal.notes) for rank in range(stages)
    ]
