"""Checks that a schedule is complete and runs to its end."""

from __future__ import annotations

from lightning_gpipe.schedule.actions import Action, Schedule, upstream_of
from lightning_gpipe.schedule.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete and runs to its end.

    Every action stands in the program of the rank that has its stage. Every stage does the same
    with the same micro-batches, each once; a backward, whole or split, follows its forward, a
    recompute stands between the two. Neighbouring stages agree on the order of what crosses between
    them (messages arrive in the order they were sent), those of one rank on its number; and no rank
    waits for ever.

    Raises:
        ValueError: Naming the rank and the action, with all programs.
    """
    for rank in range(len(schedule.programs)):
        _check_program(schedule, rank)
    for stage in range(1, len(schedule.placement)):
        _check_boundary(schedule, stage - 1, stage, "F")
        _check_boundary(schedule, stage, stage - 1, "BI")
    simulate(schedule)


def _check_program(schedule: Schedule, rank: int) -> None:
    """Check one rank's actions against each other."""
    done: set[Action] = set()
    for action in schedule.programs[rank]:
        if not 0 <= action.stage < len(schedule.placement):
            raise schedule.invalid(f"rank {rank} runs {action}, a stage that no rank has")
        if schedule.placement[action.stage] != rank:
            owner = schedule.placement[action.stage]
            raise schedule.invalid(f"rank {rank} runs {action}, whose stage is on rank {owner}")
        if action in done:
            raise schedule.invalid(f"rank {rank} runs {action} twice")
        before = {"F": "", "R": "F", "B": "F", "I": "F", "W": "I"}[action.op]
        for first in (action._replace(op=op) for op in before):  # type: ignore[arg-type]
            if first not in done:
                raise schedule.invalid(f"rank {rank} runs {action} before {first}")
        after = {"F": "", "R": "BI", "B": "I", "I": "B", "W": ""}[action.op]
        for last in (action._replace(op=op) for op in after):  # type: ignore[arg-type]
            if last in done:
                raise schedule.invalid(f"rank {rank} runs {action} after {last}")
        done.add(action)
    for action in done:
        if action.op == "I" and action._replace(op="W") not in done:
            raise schedule.invalid(f"rank {rank} runs {action}, and not the rest of its backward")


def _check_boundary(schedule: Schedule, source: int, target: int, ops: str) -> None:
    """Check that what a stage hands on to the next is sent as it is expected."""
    sent, expected = _done_by(schedule, source, ops), _done_by(schedule, target, ops)
    ours, theirs = [a.micro_batch for a in sent], [a.micro_batch for a in expected]
    first, second = schedule.placement[source], schedule.placement[target]
    # within a rank nothing arrives in order: it is taken when it is needed
    if ours != theirs and (first != second or sorted(ours) != sorted(theirs)):
        wanted = [_made(action, sent) for action in expected]
        raise schedule.invalid(
            f"rank {first} sends {sent} in this order, rank {second} expects {wanted}"
        )


def _done_by(schedule: Schedule, stage: int, ops: str) -> list[Action]:
    """A stage's actions of these kinds, in order."""
    program = schedule.programs[schedule.placement[stage]]
    return [action for action in program if action.stage == stage and action.op in ops]


def _made(action: Action, sent: list[Action]) -> Action:
    """What makes the input of an action."""
    sources = upstream_of(action)
    return next((source for source in sources if source in sent), sources[0])
