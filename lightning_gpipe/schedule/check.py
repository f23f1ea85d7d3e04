"""Checks that a schedule is complete and runs to its end."""

from __future__ import annotations

from lightning_gpipe.schedule.actions import Action, Schedule, invalid
from lightning_gpipe.schedule.simulate import simulate


def validate(schedule: Schedule) -> None:
    """Check that a schedule is complete and runs to its end.

    Every stage forwards the same micro-batches, each once; a backward follows its forward, a
    recompute stands between the two; neighbours agree on the order of what crosses between them
    (messages arrive in the order they were sent); and no stage waits for ever.

    Raises:
        ValueError: Naming the stage and the action, with the schedule drawn as a grid.
    """
    for k, program in enumerate(schedule):
        done: set[Action] = set()
        for action in program:
            op, m = action
            before = {"F": (), "R": (Action("F", m),), "B": (Action("F", m),)}[op]
            if action in done:
                raise invalid(schedule, f"stage {k} runs {action} twice")
            if any(other not in done for other in before):
                raise invalid(schedule, f"stage {k} runs {action} before {before[0]}")
            if op == "R" and Action("B", m) in done:
                raise invalid(schedule, f"stage {k} runs {action} after B{m}")
            done.add(action)
        for op, downstream in (("F", 1), ("B", -1)):
            neighbour = k + downstream
            if not 0 <= neighbour < len(schedule):
                continue
            ours = [a.micro_batch for a in program if a.op == op]
            theirs = [a.micro_batch for a in schedule[neighbour] if a.op == op]
            if ours != theirs:
                raise invalid(
                    schedule,
                    f"stage {k} sends {op} in the order {ours}, stage {neighbour} expects {theirs}",
                )
    simulate(schedule)
