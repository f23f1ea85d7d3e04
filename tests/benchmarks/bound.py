"""The shortest step of a schedule, for what stages take without messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.placement import rounds as in_rounds
from lightning_gpipe.schedule.simulate import simulate
from tests.benchmarks.turns import Result, median


class Bound:
    """The length of fill-drain, and how near steps come to it.

    The machine's pace differs from round to round, so a step is compared with the bound of its own
    round.

    Args:
        ideal: What :func:`tests.benchmarks.contestants.plain.ideal` measured.
        stages: K.
        chunks: M.
        checkpoint: As the strategy's.
    """

    def __init__(self, ideal: Result, stages: int, chunks: int, checkpoint: str) -> None:
        self._rounds_s = [
            _length_s(notes, stages, chunks, checkpoint) for notes in ideal.notes if not ideal.error
        ]
        #: The median over rounds, in seconds.
        self.median_s = median(self._rounds_s)

    def reached(self, result: Result) -> list[float]:
        """Of every round which share of its bound a step reaches; above 1 where it is shorter."""
        pairs = zip(self._rounds_s, result.step_s, strict=False)
        return [bound_s / step_s for bound_s, step_s in pairs]


def _length_s(notes: Sequence[dict[str, Any]], stages: int, chunks: int, checkpoint: str) -> float:
    """The length of fill-drain for what the stages took in a round."""
    forward, backward = ([notes[rank][kind][0] for rank in range(stages)] for kind in "FB")
    recompute = (
        [notes[rank]["R"][0] for rank in range(stages)] if checkpoint == "always" else forward
    )
    schedule = fill_drain(in_rounds(stages), chunks, checkpoint)  # type: ignore[arg-type]
    return simulate(schedule, Costs.of(forward, backward, recompute)).length
