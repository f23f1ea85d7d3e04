"""What could make a pipeline faster, in words."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from lightning_gpipe.monitor.figures import Figures
from lightning_gpipe.plan.report import OUTSIDE_LIMIT

#: By which share of the mean a stage may have more work than the others.
_SLOWER = 0.15
#: The bubble that is worth a word, and how far it may be above what is expected.
_LARGE, _BEYOND = 0.2, 0.1
#: Micro-batches for each stage with which the bubble is small (GPipe §2.3).
_ENOUGH = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """How a pipeline is made.

    Args:
        chunks: M.
        samples: In the largest mini-batch, as far as it is known.
        measures_time: Whether layers are shared out by the time that they take.
        virtual_stages: V.
        splits_step: Whether the user's step runs once per micro-batch.
        outside: Share of the parameters outside the backbone, 0 to 1.
    """

    chunks: int
    samples: int
    measures_time: bool
    virtual_stages: int
    splits_step: bool
    outside: float


def hints(figures: Figures, facts: Facts) -> list[str]:
    """What to try, the most telling first; nothing where all is well."""
    stages = len(figures.stages)
    if stages == 1:
        return []
    found = []
    busy = [stage.busy_s for stage in figures.stages]
    if figures.imbalance > _SLOWER:
        slowest = max(range(stages), key=busy.__getitem__)
        share = busy[slowest] / statistics.mean(busy) - 1
        remedy = "make its layers smaller" if facts.measures_time else "try balance='time'"
        found.append(f"stage {slowest} is {share:.0%} slower than the mean of the stages: {remedy}")
    if figures.bubble > _LARGE:
        found += _of_bubble(figures, facts, stages)
    if facts.outside > OUTSIDE_LIMIT and not facts.splits_step:
        found.append(
            f"{facts.outside:.0%} of the parameters are outside the backbone, on every stage: try"
            " step='micro-batch'"
        )
    return found


def _of_bubble(figures: Figures, facts: Facts, stages: int) -> list[str]:
    wanted, expected = _ENOUGH * stages, figures.expected_bubble
    if facts.chunks < wanted:
        possible = min(wanted, facts.samples or wanted)
        if possible > facts.chunks:
            remedy = f"try chunks={possible}"
        elif facts.virtual_stages == 1:
            remedy = "try virtual_stages=2, or larger batches"
        else:
            remedy = "try larger batches"
        return [
            f"bubble {figures.bubble:.0%}: chunks={facts.chunks} is small for {stages} stages:"
            f" {remedy}"
        ]
    if expected is not None and figures.bubble > expected + _BEYOND:
        return [
            f"bubble {figures.bubble:.0%}, and {expected:.0%} expected of what actions take:"
            " stages wait for messages, or share a processor"
        ]
    return []
