"""Replays a schedule in simulated time: its length, its bubble, what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpipe.schedule.actions import Action, Program, Schedule, kept_graphs, upstream_of

#: Time of a backward, in forwards: one for the input's gradient, one for the weights'.
BACKWARD_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank ran an action, in the simulator's unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule does when every action takes the given time and messages none.

    Args:
        spans: Every action of every rank, with its times.
        length: Time from the first start to the last end.
        bubble: Share of the ranks' time that is idle, 0 to 1: (K-1)/(M+K-1) for equal stages
            without recompute, one on each rank.
        peak_inputs: For each rank the largest number of boundary inputs that wait for a recompute
            at one time.
        peak_graphs: For each rank the largest number of micro-batches whose activations are held at
            one time, those of each of its stages counted.
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
        schedule: The programs of all ranks.
        forward: Time of one micro-batch's forward, for all stages or for each, any unit.
        backward: The same for the backward; ``None``: :data:`BACKWARD_RATIO` times the forward.
        recompute: The same for the recompute; ``None``: as long as the forward.

    Raises:
        ValueError: If the ranks wait for each other for ever.
    """
    stages = len(schedule.placement)
    forwards = _per_stage(forward, stages)
    durations = {
        "F": forwards,
        "B": [BACKWARD_RATIO * time for time in forwards]
        if backward is None
        else _per_stage(backward, stages),
        "R": forwards if recompute is None else _per_stage(recompute, stages),
    }
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    clock = [0.0] * len(schedule.programs)
    cursor = [0] * len(schedule.programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(schedule.programs):
            while cursor[rank] < len(program):
                action = program[cursor[rank]]
                source = upstream_of(action)
                if source is None or not 0 <= source.stage < stages:
                    arrival = 0.0
                elif source in ends:
                    arrival = ends[source]
                else:
                    break
                start = max(clock[rank], arrival)
                clock[rank] = ends[action] = start + durations[action.op][action.stage]
                spans.append(Span(rank, action, start, clock[rank]))
                cursor[rank] += 1
                progress = True
    for rank, program in enumerate(schedule.programs):
        if cursor[rank] < len(program):
            raise schedule.invalid(f"rank {rank} waits for ever at {program[cursor[rank]]}")
    length = max(clock, default=0.0)
    busy = sum(span.end - span.start for span in spans)
    return Simulation(
        spans=tuple(spans),
        length=length,
        bubble=1 - busy / (length * len(clock)) if length else 0.0,
        peak_inputs=tuple(_peak_inputs(program) for program in schedule.programs),
        peak_graphs=tuple(_peak_graphs(program) for program in schedule.programs),
    )


def grid(schedule: Schedule) -> str:
    """Draw a schedule: a row a rank, a column a unit of time, every action taking one."""
    spans = simulate(schedule, backward=1.0).spans
    width = max((len(repr(span.action)) for span in spans), default=3)
    columns = round(max((span.end for span in spans), default=0))
    rows = [[" " * width] * columns for _ in schedule.programs]
    for span in spans:
        rows[span.rank][round(span.start)] = repr(span.action).ljust(width)
    return "\n".join(f"rank {rank} | {' '.join(row)}".rstrip() for rank, row in enumerate(rows))


def _per_stage(value: Sequence[float] | float, stages: int) -> list[float]:
    if isinstance(value, (int, float)):
        return [float(value)] * stages
    return [float(v) for v in value]


def _peak_inputs(program: Program) -> int:
    """Largest number of inputs between a forward and its recompute."""
    recomputed = {(stage, m) for stage, op, m in program if op == "R"}
    held = peak = 0
    for stage, op, m in program:
        held += (op == "F" and (stage, m) in recomputed) - (op == "R")
        peak = max(peak, held)
    return peak


def _peak_graphs(program: Program) -> int:
    """Largest number of graphs between their making and their backward."""
    kept = kept_graphs(program)
    held = peak = 0
    for stage, op, m in program:
        held += (op == "R" or (op == "F" and (stage, m) in kept)) - (op == "B")
        peak = max(peak, held)
    return peak
