"""Replays a schedule in simulated time: its length, its bubble, its messages."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_gpipe.schedule.actions import Action, Program, Schedule, kept_graphs, upstream_of
from lightning_gpipe.schedule.costs import Costs


class Span(NamedTuple):
    """When a rank ran an action, in the simulator's unit of time."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule does when everything takes the given time.

    Args:
        spans: Every action of every rank, with its times.
        length: Time from the first start to the last end.
        period: The longest time from a rank's first start to its last end. Mini-batch after
            mini-batch takes no longer, where a rank begins the next one as soon as it can: those
            behind are at its drain while those ahead fill it.
        bubble: Share of the ranks' time that is idle, 0 to 1: (K-1)/(M+K-1) for equal stages
            without recompute, one on each rank.
    """

    spans: tuple[Span, ...]
    length: float
    period: float
    bubble: float


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Replay a schedule in simulated time.

    Args:
        schedule: The programs of all ranks.
        costs: What the actions take; ``None``: every forward 1, and what follows of it.

    Raises:
        ValueError: If the ranks wait for each other for ever.
    """
    times = costs or Costs.of([1.0] * len(schedule.placement))
    spans, cursor = _replay(schedule, times)
    for rank, program in enumerate(schedule.programs):
        if cursor[rank] < len(program):
            raise schedule.invalid(f"rank {rank} waits for ever at {program[cursor[rank]]}")
    length = max((span.end for span in spans), default=0.0)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:  # in the order of each rank's program
        starts.setdefault(span.rank, span.start)
        ends[span.rank] = span.end
    busy = sum(span.end - span.start for span in spans)
    return Simulation(
        spans=tuple(spans),
        length=length,
        period=max((end - starts[rank] for rank, end in ends.items()), default=0.0),
        bubble=1 - busy / (length * len(schedule.programs)) if length else 0.0,
    )


def leads(schedule: Schedule) -> dict[tuple[int, int], int]:
    """How far senders get ahead of receivers.

    Returns:
        For every pair of neighbouring stages (source, target), the largest number of results that
        the source has sent and the target has not yet taken, when all actions take as long as each
        other. With room for as many under way, no rank waits for ever, whatever actions take: this
        run is one that needs no more.
    """
    events = []
    for span in _alike(schedule):
        stage, target = span.action.stage, _target_of(span.action)
        if target is not None:
            events.append((span.end, 0, (stage, target)))
            events.append((span.start, 1, (2 * stage - target, stage)))
    under_way: dict[tuple[int, int], int] = {}
    most: dict[tuple[int, int], int] = {}
    for _, is_taken, link in sorted(events):
        under_way[link] = under_way.get(link, 0) + (-1 if is_taken else 1)
        most[link] = max(most.get(link, 0), under_way[link])
    return most


def receives(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    """When a rank posts its receives, so that ranks post all messages in one order.

    The order is that in which the messages are made when all actions take as long as each other. A
    message that waits for those before it in this order, on both ranks, waits for nothing else: no
    rank waits for ever, even if a device runs one operation at a time. A chained micro-batch's come
    when its last forward ends: until then ranks wait, and what others make has to arrive.

    Args:
        schedule: The programs of all ranks.
        rank: The rank.

    Returns:
        For an action of the rank the actions of other ranks whose messages arrive during it, in
        order.
    """
    spans = _alike(schedule)
    ends = {span.action: span.end for span in spans}

    def when(span: Span) -> tuple[Any, ...]:
        is_chained = span.action.op == "F" and span.action.micro_batch in schedule.chained
        return (ends[schedule.last_of(span.action)] if is_chained else span.end, *span.action)

    order = [(span.action, span.rank) for span in sorted(spans, key=when)]
    place = {action: i for i, (action, _) in enumerate(order)}
    own = schedule.programs[rank]
    found: dict[Action, list[Action]] = {}
    for action, sender in order:
        target = _target_of(action)
        if sender == rank or target is None or not 0 <= target < len(schedule.placement):
            continue
        if schedule.placement[target] == rank:
            during = bisect_right(own, place[action], key=place.__getitem__)
            found.setdefault(own[during], []).append(action)
    return {action: tuple(messages) for action, messages in found.items()}


def _alike(schedule: Schedule) -> tuple[Span, ...]:
    """When actions run that take as long as each other."""
    units = (1.0,) * len(schedule.placement)
    return simulate(schedule, Costs(units, units, units, units, units)).spans


def _target_of(action: Action) -> int | None:
    """The stage to which the result of an action goes."""
    if action.op == "F":
        return action.stage + 1
    return action.stage - 1 if action.op in ("B", "I") else None


def is_complete(schedule: Schedule) -> bool:
    """Whether no rank waits for ever."""
    spans, _ = _replay(schedule, Costs.of([1.0] * len(schedule.placement)))
    return len(spans) == sum(map(len, schedule.programs))


def _replay(schedule: Schedule, costs: Costs) -> tuple[list[Span], list[int]]:
    """Run the programs as far as they go; returns how far each rank came, too."""
    stages, times, placement = len(schedule.placement), costs.times, schedule.placement
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    clock = [0.0] * len(schedule.programs)
    cursor = [0] * len(schedule.programs)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(schedule.programs):
            now, place = clock[rank], cursor[rank]
            for action in program[place:]:
                start = now
                sources = [s for s in upstream_of(action) if 0 <= s.stage < stages]
                if sources:
                    made = next((s for s in sources if s in ends), None)
                    if made is None:
                        break
                    start = max(start, ends[made] + costs.message * (placement[made.stage] != rank))
                passed = _waits_for(schedule, program, place) if schedule.chained else None
                if passed is not None:
                    if passed not in ends:
                        break
                    start = max(start, ends[passed])
                ends[action] = now = start + times[action.op][action.stage]
                spans.append(Span(rank, action, start, now))
                place += 1
            progress |= place > cursor[rank]
            clock[rank], cursor[rank] = now, place
    return spans, cursor


def _waits_for(schedule: Schedule, program: Program, place: int) -> Action | None:
    """The end of a chained micro-batch's forwards, for which a rank waits before an action."""
    if not place:
        return None
    before, action = program[place - 1], program[place]
    if before.op != "F" or before.micro_batch not in schedule.chained:
        return None
    goes_on = action.op == "F" and action.micro_batch == before.micro_batch
    return None if goes_on else schedule.last_of(before)


def peak_graphs(program: Program) -> int:
    """Largest number of graphs between their making and their backward, of all stages of a rank."""
    kept = kept_graphs(program)
    held = peak = 0
    for stage, op, m in program:
        held += (op == "R" or (op == "F" and (stage, m) in kept)) - (op in ("B", "W"))
        peak = max(peak, held)
    return peak
