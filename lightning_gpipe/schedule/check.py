"""Checks that a schedule is complete and runs to its end."""

from __future__ import annotations

from itertools import pairwise

from lightning_gpipe.schedule.actions import Action, Op, Schedule
from lightning_gpipe.schedule.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete and runs to its end.

    Every action stands in the program of the rank that has its stage. Every stage does the same
    with the same micro-batches, each once; a backward follows its forward, a recompute stands
    between the two. Two ranks agree on the order of what crosses between them (messages arrive in
    the order they were sent); and no rank waits for ever.

    Raises:
        ValueError: Naming the rank and the action, with all programs.
    """
    for rank in range(len(schedule.programs)):
        _check_program(schedule, rank)
    for op in ("F", "B"):
        _check_crossings(schedule, op)
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
        forward, backward = action._replace(op="F"), action._replace(op="B")
        if action in done:
            raise schedule.invalid(f"rank {rank} runs {action} twice")
        if action.op != "F" and forward not in done:
            raise schedule.invalid(f"rank {rank} runs {action} before {forward}")
        if action.op == "R" and backward in done:
            raise schedule.invalid(f"rank {rank} runs {action} after {backward}")
        done.add(action)


def _check_crossings(schedule: Schedule, op: Op) -> None:
    """Check that what ``op`` hands on from stage to stage is sent as it is expected."""
    step = 1 if op == "F" else -1
    sent: dict[tuple[int, int], list[Action]] = {}
    expected: dict[tuple[int, int], list[Action]] = {}
    order = range(len(schedule.placement))[::step]
    before = {stage: previous for previous, stage in pairwise(order)}
    after = dict(pairwise(order))
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if action.op != op:
                continue
            if action.stage in after:
                link = rank, schedule.placement[after[action.stage]]
                sent.setdefault(link, []).append(action)
            if action.stage in before:
                source = before[action.stage]
                link = schedule.placement[source], rank
                expected.setdefault(link, []).append(action._replace(stage=source))
    for link in {**sent, **expected}:
        ours, theirs = sent.get(link, []), expected.get(link, [])
        alike = sorted(ours) == sorted(theirs) if link[0] == link[1] else ours == theirs
        if not alike:  # within a rank nothing arrives in order: it is taken when it is needed
            raise schedule.invalid(
                f"rank {link[0]} sends {ours} in this order, rank {link[1]} expects {theirs}"
            )
