"""GPipe's schedule: all forwards, then all backwards."""

from __future__ import annotations

from functools import lru_cache

from lightning_gpipe.schedule.actions import Action, Checkpoint, Op, Schedule


@lru_cache(maxsize=256)
def fill_drain(stages: int, micro_batches: int, checkpoint: Checkpoint) -> Schedule:
    """GPipe's schedule: all forwards, then all backwards in reverse order (GPipe, figure 2c).

    A recompute stands *before* its backward as an action of its own, so that a stage runs it while
    the gradient is still on its way (GPipe §2.3). Every rank runs one stage, all with the same
    program; the waits between stages skew them::

        rank 0 | 0F0 0F1 0F2 0R2                 0B2 0R1 0B1 0R0 0B0
        rank 1 |     1F0 1F1 1F2 1R2         1B2 1R1 1B1 1R0 1B0
        rank 2 |         2F0 2F1 2F2 2R2 2B2 2R1 2B1 2R0 2B0

    Args:
        stages: K.
        micro_batches: M.
        checkpoint: Which micro-batches are re-materialized: all, all but the last (whose backward
            comes first), none.
    """
    kept = {"always": (), "except_last": (micro_batches - 1,), "never": range(micro_batches)}[
        checkpoint
    ]
    program: list[tuple[Op, int]] = [("F", m) for m in range(micro_batches)]
    for m in reversed(range(micro_batches)):
        if m not in kept:
            program.append(("R", m))
        program.append(("B", m))
    return _on_every_rank(stages, program)


@lru_cache(maxsize=256)
def forward_only(stages: int, micro_batches: int) -> Schedule:
    """The schedule of evaluation, and of any call without gradients."""
    return _on_every_rank(stages, [("F", m) for m in range(micro_batches)])


def _on_every_rank(stages: int, program: list[tuple[Op, int]]) -> Schedule:
    """Every rank runs one stage, and does the same with it."""
    programs = tuple(tuple(Action(stage, op, m) for op, m in program) for stage in range(stages))
    return Schedule(programs, tuple(range(stages)))
