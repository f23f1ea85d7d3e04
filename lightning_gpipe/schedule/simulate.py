"""Replays a schedule in simulated time: its length, its bubble, what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpipe.schedule.actions import Action, Program, Schedule, invalid, kept_graphs

#: Time of a backward, in forwards: one for the input's gradient, one for the weights'.
BACKWARD_RATIO = 2.0


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
    backward: Sequence[float] | float | None = None,
    recompute: Sequence[float] | float | None = None,
) -> Simulation:
    """Replay a schedule in simulated time.

    Args:
        schedule: The programs of all stages.
        forward: Time of one micro-batch's forward, for all stages or for each, any unit.
        backward: The same for the backward; ``None``: :data:`BACKWARD_RATIO` times the forward.
        recompute: The same for the recompute; ``None``: as long as the forward.

    Raises:
        ValueError: If the stages wait for each other for ever.
    """
    stages = len(schedule)
    forwards = _per_stage(forward, stages)
    durations = {
        "F": forwards,
        "R": forwards if recompute is None else _per_stage(recompute, stages),
        "B": [BACKWARD_RATIO * time for time in forwards]
        if backward is None
        else _per_stage(backward, stages),
    }
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
        raise invalid(schedule, f"stage {k} waits for ever at {schedule[k][cursor[k]]}")
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
    spans = simulate(schedule, backward=1.0).spans
    width = max((len(repr(span.action)) for span in spans), default=2)
    columns = round(max((span.end for span in spans), default=0))
    rows = [[" " * width] * columns for _ in schedule]
    for span in spans:
        rows[span.stage][round(span.start)] = repr(span.action).ljust(width)
    return "\n".join(f"stage {k} | {' '.join(row)}".rstrip() for k, row in enumerate(rows))


def _per_stage(value: Sequence[float] | float, stages: int) -> list[float]:
    return [float(value)] * stages if isinstance(value, (int, float)) else list(map(float, value))


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
