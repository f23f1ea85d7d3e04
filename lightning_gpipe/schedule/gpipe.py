"""GPipe's schedule: all forwards, then all backwards."""

from __future__ import annotations

from functools import lru_cache

from lightning_gpipe.schedule.actions import Action, Checkpoint, Schedule


@lru_cache(maxsize=256)
def fill_drain(stages: int, micro_batches: int, checkpoint: Checkpoint) -> Schedule:
    """GPipe's schedule: all forwards, then all backwards in reverse order (GPipe, figure 2c).

    A recompute stands *before* its backward as an action of its own, so that a stage runs it while
    the gradient is
    still on its way (GPipe §2.3). Every stage has the same program; the waits between stages skew
    them::

        stage 0 | F0 F1 F2 R2             B2 R1 B1 R0 B0
        stage 1 |    F0 F1 F2 R2       B2 R1 B1 R0 B0
        stage 2 |       F0 F1 F2 R2 B2 R1 B1 R0 B0

    Args:
        stages: K.
        micro_batches: M.
        checkpoint: Which micro-batches are re-materialized: all, all but the last (whose backward
            comes first), none.
    """
    kept = {"always": (), "except_last": (micro_batches - 1,), "never": range(micro_batches)}[
        checkpoint
    ]
    program = [Action("F", m) for m in range(micro_batches)]
    for m in reversed(range(micro_batches)):
        if m not in kept:
            program.append(Action("R", m))
        program.append(Action("B", m))
    return (tuple(program),) * stages


@lru_cache(maxsize=256)
def forward_only(stages: int, micro_batches: int) -> Schedule:
    """The schedule of evaluation, and of any call without gradients."""
    return (tuple(Action("F", m) for m in range(micro_batches)),) * stages
