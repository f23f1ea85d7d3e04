"""GPipe's schedule, all forwards, then all backwards; one rank's; and what is made of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from lightning_gpipe.schedule.actions import Action, Program, Schedule
from lightning_gpipe.schedule.checkpoint import Checkpoint, recomputed


@lru_cache(maxsize=256)
def fill_drain(
    placement: tuple[int, ...],
    micro_batches: int,
    checkpoint: Checkpoint,
    ascending: bool = False,
) -> Schedule:
    """GPipe's schedule: all forwards, then all backwards in reverse order (GPipe, figure 2c).

    A recompute stands *before* its backward as an action of its own, so that a stage runs it while
    the gradient is still on its way (GPipe §2.3). Ranks of one stage all have the same program; the
    waits between stages skew them::

        rank 0 | 0F0 0F1 0F2 0R2                 0B2 0R1 0B1 0R0 0B0
        rank 1 |     1F0 1F1 1F2 1R2         1B2 1R1 1B1 1R0 1B0
        rank 2 |         2F0 2F1 2F2 2R2 2B2 2R1 2B1 2R0 2B0

    A rank of several stages runs all micro-batches through the first of them, then the next
    (breadth first): with K ranks in rounds and M >= K nobody waits between two of them.

    Args:
        placement: For each stage its rank.
        micro_batches: M.
        checkpoint: Of which micro-batches activations are re-materialized.
        ascending: Whether the backwards run in the order of the forwards.
    """
    order = list(range(micro_batches))[:: 1 if ascending else -1]
    again = set(order[micro_batches - recomputed(checkpoint, micro_batches) :])
    programs: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        programs[rank] += [Action(stage, "F", m) for m in range(micro_batches)]
    for stage, rank in reversed(list(enumerate(placement))):
        for m in order:
            programs[rank] += backward(stage, m, m in again)
    return Schedule(tuple(map(tuple, programs)), placement)


@lru_cache(maxsize=256)
def in_turn(placement: tuple[int, ...], micro_batches: int, checkpoint: Checkpoint) -> Schedule:
    """One micro-batch after another, forward and backward: for one rank, which waits for nobody.

    The last stage recomputes nothing, since its backward follows its forward at once.

    Args:
        placement: For each stage its rank, which is 0.
        micro_batches: M.
        checkpoint: Of which micro-batches activations are re-materialized; the last ones are.
    """
    again = micro_batches - recomputed(checkpoint, micro_batches)
    stages = range(len(placement))
    program: list[Action] = []
    for m in range(micro_batches):
        program += [Action(stage, "F", m) for stage in stages]
        for stage in reversed(stages):
            program += backward(stage, m, m >= again and stage != stages[-1])
    return Schedule((tuple(program),), placement, frozenset(range(micro_batches)))


def chained(schedule: Schedule, micro_batches: frozenset[int]) -> Schedule:
    """A schedule of which some micro-batches are chained; see :class:`Schedule`.

    A rank of one stage has the same program, and waits in it. With several stages a rank those
    micro-batches' forwards, and all before them, come before the rest of the program.

    Args:
        schedule: The schedule.
        micro_batches: Those that are chained.
    """
    if not micro_batches:
        return schedule
    if len(schedule.placement) == len(schedule.programs):
        return replace(schedule, chained=micro_batches)
    end = max(micro_batches) + 1
    programs = []
    for program in schedule.programs:
        first = [action for action in _forwards(program) if action.micro_batch < end]
        first.sort(key=lambda action: (action.micro_batch, action.stage))
        is_rest = set(program).difference(first).__contains__
        programs.append((*first, *filter(is_rest, program)))
    return replace(schedule, programs=tuple(programs), chained=frozenset(range(end)))


@lru_cache(maxsize=256)
def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """The schedule of evaluation, and of any call without gradients."""
    return without_backwards(fill_drain(placement, micro_batches, "never"))


def without_backwards(schedule: Schedule) -> Schedule:
    """The forwards of a schedule."""
    return replace(schedule, programs=tuple(map(_forwards, schedule.programs)))


def backward(stage: int, m: int, again: bool) -> list[Action]:
    """A micro-batch's backward in a stage, after its recompute if there is one."""
    return [Action(stage, "R", m)] * again + [Action(stage, "B", m)]


def _forwards(program: Iterable[Action]) -> Program:
    return tuple(action for action in program if action.op == "F")
