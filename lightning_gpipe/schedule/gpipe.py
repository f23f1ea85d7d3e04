"""What every stage does, in which order: schedules as plain data.

A *schedule* is one program per stage, a program a sequence of actions. The engine runs the program
of its stage; the validator, the grid printer and the simulator read the same data. This module
knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

Op: TypeAlias = Literal["F", "R", "B"]
Checkpoint: TypeAlias = Literal["always", "except_last", "never"]
CHECKPOINT_MODES: tuple[Checkpoint, ...] = get_args(Checkpoint)


class Action(NamedTuple):
    """One thing a stage does with one micro-batch.

    Args:
        op: ``F`` forward; ``R`` re-materialize, that is run the forward again from the kept input,
            this time keeping its activations; ``B`` backward.
        micro_batch: Index of the micro-batch, from 0.
    """

    op: Op
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.op}{self.micro_batch}"


Program: TypeAlias = tuple[Action, ...]
Schedule: TypeAlias = tuple[Program, ...]


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


@lru_cache(maxsize=256)
def kept_graphs(program: Program) -> frozenset[int]:
    """The micro-batches whose forward keeps its activations for the backward."""
    recomputed = {m for op, m in program if op == "R"}
    return frozenset(m for op, m in program if op == "B" and m not in recomputed)


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
                raise _invalid(schedule, f"stage {k} runs {action} twice")
            if any(other not in done for other in before):
                raise _invalid(schedule, f"stage {k} runs {action} before {before[0]}")
            if op == "R" and Action("B", m) in done:
                raise _invalid(schedule, f"stage {k} runs {action} after B{m}")
            done.add(action)
        for op, downstream in (("F", 1), ("B", -1)):
            neighbour = k + downstream
            if not 0 <= neighbour < len(schedule):
                continue
            ours = [a.micro_batch for a in program if a.op == op]
            theirs = [a.micro_batch for a in schedule[neighbour] if a.op == op]
            if ours != theirs:
                raise _invalid(
                    schedule,
                    f"stage {k} sends {op} in the order {ours}, stage {neighbour} expects {theirs}",
                )
    simulate(schedule)


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage ran an action, in the simulator's unit of time."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule does when every action takes the given time and messages none.

    Args:
        spans: Every action of every stage, with its times.
        length: Time from the first start to the last end.
        bubble: Share of the stages' time that is idle, 0 to 1: (K-1)/(M+K-1) for equal stages
            without recompute.
        peak_inputs: For each stage the largest number of boundary inputs that wait for a recompute
            at one time.
        peak_graphs: For each stage the largest number of micro-batches whose activations are held
            at one time.
    """

    spans: tuple[Span, ...]
    length: float
    bubble: float
    peak_inputs: tuple[int, ...]
    peak_graphs: tuple[int, ...]


def simulate(
    schedule: Schedule,
    forward: Sequence[float] | float = 1.0,
    backward: Sequence[float] | float = 1.0,
    recompute: Sequence[float] | float | None = None,
) -> Simulation:
    """Replay a schedule in simulated time.

    Args:
        schedule: The programs of all stages.
        forward: Time of one micro-batch's forward, for all stages or for each, any unit.
        backward: The same for the backward.
        recompute: The same for the recompute; ``None``: as long as the forward.

    Raises:
        ValueError: If the stages wait for each other for ever.
    """
    stages = len(schedule)
    durations: dict[str, list[float]] = {}
    for op, value in (
        ("F", forward),
        ("B", backward),
        ("R", forward if recompute is None else recompute),
    ):
        durations[op] = (
            [float(value)] * stages
            if isinstance(value, (int, float))
            else [float(v) for v in value]
        )
    ends: dict[tuple[int, Action], float] = {}
    spans: list[Span] = []
    clock = [0.0] * stages
    cursor = [0] * stages
    progress = True
    while progress:
        progress = False
        for k, program in enumerate(schedule):
            while cursor[k] < len(program):
                action = program[cursor[k]]
                source = {"F": k - 1, "B": k + 1, "R": -1}[action.op]
                arrival = 0.0
                if 0 <= source < stages:
                    if (source, action) not in ends:
                        break
                    arrival = ends[source, action]
                start = max(clock[k], arrival)
                clock[k] = ends[k, action] = start + durations[action.op][k]
                spans.append(Span(k, action, start, clock[k]))
                cursor[k] += 1
                progress = True
    stuck = [k for k, program in enumerate(schedule) if cursor[k] < len(program)]
    if stuck:
        k = stuck[0]
        raise _invalid(schedule, f"stage {k} waits for ever at {schedule[k][cursor[k]]}")
    length = max(clock, default=0.0)
    busy = sum(span.end - span.start for span in spans)
    return Simulation(
        spans=tuple(spans),
        length=length,
        bubble=1 - busy / (length * stages) if length else 0.0,
        peak_inputs=tuple(_peak(program, recomputed=True) for program in schedule),
        peak_graphs=tuple(_peak(program, recomputed=False) for program in schedule),
    )


def grid(schedule: Schedule) -> str:
    """Draw a schedule: a row a stage, a column a unit of time, every action taking one."""
    spans = simulate(schedule).spans
    width = max((len(repr(span.action)) for span in spans), default=2)
    columns = round(max((span.end for span in spans), default=0))
    rows = [[" " * width] * columns for _ in schedule]
    for span in spans:
        rows[span.stage][round(span.start)] = repr(span.action).ljust(width)
    return "\n".join(f"stage {k} | {' '.join(row)}".rstrip() for k, row in enumerate(rows))


def _peak(program: Program, recomputed: bool) -> int:
    """Largest number of micro-batches between two of a program's actions."""
    held = peak = 0
    for op, m in program:
        kept = m in kept_graphs(program)
        if recomputed:
            held += (op == "F" and Action("R", m) in program) - (op == "R")
        else:
            held += (op == "R" or (op == "F" and kept)) - (op == "B")
        peak = max(peak, held)
    return peak


def _invalid(schedule: Schedule, problem: str) -> ValueError:
    programs = "\n".join(
        f"  stage {k}: {' '.join(map(repr, program))}" for k, program in enumerate(schedule)
    )
    return ValueError(f"Invalid schedule: {problem}.\n{programs}")
