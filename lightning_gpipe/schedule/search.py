"""Finds a schedule for measured costs: list scheduling within a limit of memory.

Every rank computes the same schedule of the same numbers, so nothing of it is sent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from lightning_gpipe.schedule.actions import Action, Op, Schedule
from lightning_gpipe.schedule.checkpoint import Checkpoint, recomputed
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.one_f_one_b import one_f_one_b
from lightning_gpipe.schedule.simulate import Simulation, peak_graphs, simulate

#: Micro-batches under way on a rank at most, in numbers of ranks.
_FACTORS = 0.5, 1.0, 1.5, 2.0, math.inf
_FEW_FACTORS = 1.0, math.inf
#: What a rank may hold, in shares of the limit.
_SHARES = 1.0, 0.75, 0.5
#: How much later messages come now and then than they take, in forwards.
_LATE = 0.1
#: How much longer a schedule may be that holds less or has fewer actions: where activations are
#: re-materialized, to save memory, and where they are kept.
_SLACK_RECOMPUTED, _SLACK_KEPT = 1.01, 1.005
#: Of how many micro-batches a stage splits the backward, the last ones: (a, b, c) means
#: a + b * K + c * stage. In the drain others wait for the first halves, and there is room for the
#: second ones; before that a split mostly costs time and memory. The first ones are tried even if
#: there are so many forwards that no more can be.
_SPLITS = (math.inf, 0, 0), (1, 1, 0), (0, 0, 3), (0, 0, 2), (0, 1, 0), (0, 2, 0), (0, 0, 4)
_TRIED, _FORWARDS = 2, 512
#: Micro-batches for which a rank may have to leave room, so that others go on.
_WAITING = 3


@lru_cache(maxsize=32)  # a plan asks for the same with every cut that it tries
def search(
    placement: tuple[int, ...],
    micro_batches: int,
    checkpoint: Checkpoint,
    costs: Costs,
    limit: float = math.inf,
    whole: frozenset[int] = frozenset(),
    joins_last: bool = False,
    splits_all: bool = False,
) -> Schedule:
    """Find a short schedule.

    Each time a rank is free, it takes, of what it may do then: a backward of the input; the
    recompute for a gradient that has come; a forward; a recompute ahead of its gradient; a backward
    of weights. The search tries several numbers of micro-batches under way, and of those whose
    backwards are split, and compares with fill-drain and 1F1B. Mini-batch after mini-batch takes a
    schedule's length where ranks wait for each other at a step's end, as to clip by the norm, and
    else its period; what counts is the mean of both. Of what is as short, also where messages come
    late, it takes what holds the fewest activations where they are re-materialized (within 1 %),
    and what has the fewest actions where they are kept (within 0.5 %). What it finds is never
    longer than fill-drain or 1F1B, if these keep the limit. Forwards, backwards and the backwards
    of weights run in the order of micro-batches in every stage.

    Args:
        placement: For each stage its rank.
        micro_batches: M.
        checkpoint: Of which micro-batches activations are re-materialized; the last ones are.
        costs: What the actions take.
        limit: The largest number of micro-batches whose activations a rank holds at one time; each
            of its V stages has a V-th of a micro-batch's. Where no schedule keeps it, the smallest
            that one does.
        whole: Stages whose backward can't be split.
        joins_last: Whether the last micro-batch's backward isn't split on any stage.
        splits_all: Whether all others are, where that keeps the limit: to measure what it costs.
    """
    ranks = max(placement) + 1
    kept = micro_batches - recomputed(checkpoint, micro_batches)
    end = micro_batches - joins_last
    split = _splits(placement, end, whole)[: 1 if splits_all else None]
    none = tuple(end for _ in placement)
    found: dict[Schedule, _Found] = {}
    shared: dict[Action, Action] = {}
    counts = [placement.count(rank) for rank in range(ranks)]
    tried: set[tuple[object, ...]] = set()
    late = replace(costs, message=costs.message + _LATE * min(costs.forward))
    guesses = [(costs, split, _FACTORS), (costs, [] if splits_all else [none], _FEW_FACTORS)]
    if not costs.are_multiples:
        # with rounded times what comes almost together does so, and ranks keep in step; nor do they
        # begin something else in the little time that a message takes
        guesses[1:1] = [
            (late, split, _FACTORS),
            (costs.rounded(1), split, _FACTORS),
            (replace(costs.rounded(4), message=0.0), split, _FEW_FACTORS),
        ]
    else:  # nothing was measured, and ranks keep in step
        guesses[0] = costs, split, _FEW_FACTORS
    for guess, begins, factors in guesses:
        shares = _SHARES if limit < math.inf else (1.0,)
        for begin, factor, share in product(begins, factors, shares):
            slots = _in_parts(share * limit, counts, micro_batches + _WAITING)
            most = _in_parts(factor * ranks, counts, micro_batches)
            if (key := (guess, begin, slots, most)) in tried:
                continue
            tried.add(key)
            lists = _Lists(placement, micro_batches, kept, guess, begin, end, shared)
            made = lists.run(slots, most)
            if made is not None and made not in found:
                found[made] = _Found.of(made, costs)
    others = [fill_drain(placement, micro_batches, checkpoint, ascending=True)]
    if placement == tuple(range(ranks)) * (len(placement) // ranks):
        others.append(one_f_one_b(placement, micro_batches, checkpoint))
    known = [] if splits_all and found else [_Found.of(other, costs) for other in others]
    candidates = [*found.values(), *known]
    least = min(max(one.held, limit) for one in candidates)
    longest = min((one.length for one in known if one.held <= least), default=math.inf)
    fit = [one for one in candidates if one.held <= least and one.length <= longest]
    slack = _SLACK_KEPT if kept == micro_batches else _SLACK_RECOMPUTED
    best = slack * min(map(_time, fit))
    short = [one for one in fit if _time(one) <= best]
    times = [_time(simulate(one.schedule, late)) for one in short]
    short = [one for one, time in zip(short, times, strict=True) if time <= slack * min(times)]
    if kept == micro_batches:
        return min(short, key=lambda one: (one.actions, one.held, _time(one))).schedule
    return min(short, key=lambda one: (one.held, one.actions, _time(one))).schedule


def _in_parts(limit: float, counts: Sequence[int], largest: int) -> tuple[int, ...]:
    """A limit of micro-batches as one of each rank's parts of them.

    Args:
        limit: On every rank.
        counts: For each rank its stages, each of which has such a part.
        largest: From where a limit makes no difference.
    """
    return tuple(int(min(limit, largest) * count + 1e-9) for count in counts)


def _splits(placement: tuple[int, ...], end: int, whole: frozenset[int]) -> list[tuple[int, ...]]:
    """For each stage the first micro-batch whose backward is split, up to an end; several ways."""
    ranks, forwards = max(placement) + 1, len(placement) * end
    tried = max(_TRIED, _FORWARDS // max(forwards, 1))
    found = {
        tuple(
            end if s in whole else max(0, end - int(min(a + b * ranks + c * s, end)))
            for s in range(len(placement))
        ): None
        for a, b, c in _SPLITS[:tried]
    }
    return list(found)


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule, its times as in a simulation, and what a rank holds of activations at most."""

    schedule: Schedule
    length: float
    period: float
    held: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> _Found:
        """What is known of a schedule."""
        seen = simulate(schedule, costs)
        return cls(schedule, seen.length, seen.period, held(schedule))

    @property
    def actions(self) -> int:
        """How many there are."""
        return sum(map(len, self.schedule.programs))


def _time(seen: _Found | Simulation) -> float:
    """What a mini-batch takes: its length or its period."""
    return (seen.length + seen.period) / 2


def held(schedule: Schedule) -> float:
    """The largest number of micro-batches whose activations a rank holds at one time."""
    counts = [schedule.placement.count(rank) for rank in range(len(schedule.programs))]
    peaks = map(peak_graphs, schedule.programs)
    return max(peak / count for peak, count in zip(peaks, counts, strict=True))


@dataclass(slots=True)
class _Progress:
    """How far a stage is: the next micro-batch for each kind of action, and what is there for it.

    Args:
        inputs: When each micro-batch's input arrives.
        gradients: When the gradient of each micro-batch's output arrives.
        kept: How many micro-batches keep their forward's activations, the first ones.
        split_from: The first micro-batch whose backward is split.
        whole_from: The first one behind it whose backward isn't.
        graphs: Micro-batches whose activations it holds.
    """

    inputs: list[float]
    gradients: list[float]
    kept: int
    split_from: int
    whole_from: int
    forward: int = 0
    recompute: int = 0
    backward: int = 0
    weights: int = 0
    graphs: int = 0


class _Lists:
    """One run of list scheduling.

    Args:
        placement: For each stage its rank.
        micro_batches: M.
        kept: How many micro-batches keep their forward's activations.
        costs: What the actions take.
        split_from: For each stage the first micro-batch whose backward is split.
        whole_from: The first one behind it whose backward isn't.
        shared: Actions made before; a search holds many schedules of the same ones.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        micro_batches: int,
        kept: int,
        costs: Costs,
        split_from: tuple[int, ...],
        whole_from: int,
        shared: dict[Action, Action],
    ) -> None:
        self._shared = shared
        self._placement, self._count, self._costs = placement, micro_batches, costs
        self._last = len(placement) - 1
        never = [math.inf] * micro_batches
        self._stages = [
            _Progress(
                inputs=list(never) if s else [0.0] * micro_batches,
                gradients=list(never),
                kept=micro_batches if s == self._last else kept,  # its backward follows at once
                split_from=split_from[s],
                whole_from=whole_from,
            )
            for s in range(len(placement))
        ]
        for stage in self._stages:
            stage.recompute = stage.kept
        ranks = range(max(placement) + 1)
        self._of_rank = [[s for s, at in enumerate(placement) if at == rank] for rank in ranks]
        self._slots: tuple[int, ...] = ()
        self._most_under_way: tuple[int, ...] = ()
        self._graphs = [0 for _ in ranks]  # of all stages of a rank, and so the next
        self._under_way = [0 for _ in ranks]

    def run(self, slots: tuple[int, ...], most_under_way: tuple[int, ...]) -> Schedule | None:
        """Make the programs; None if they don't come to an end within the limits.

        Args:
            slots: For each rank how many activations of its stages it holds at most.
            most_under_way: How many are between forward and backward at most.
        """
        self._slots, self._most_under_way = slots, most_under_way
        times = self._costs.times
        programs: list[list[Action]] = [[] for _ in self._of_rank]
        free = [0.0] * len(programs)
        events = [(0.0, rank) for rank in range(len(programs))]
        while events:
            now, rank = heapq.heappop(events)
            action = self._best(rank, now) if free[rank] <= now else None
            if action is None:
                continue
            free[rank] = end = now + times[action.op][action.stage]
            programs[rank].append(self._shared.setdefault(action, action))
            heapq.heappush(events, (end, rank))
            heapq.heappush(events, self._do(action, rank, end))
        if any(stage.weights < self._count for stage in self._stages):
            return None
        return Schedule(tuple(map(tuple, programs)), self._placement)

    def _best(self, rank: int, now: float) -> Action | None:
        """What a rank does now, if there is anything to do.

        Activations that wait for a gradient from another rank leave room for the stages behind
        them on this rank, which must go on for it to come: a place for each that keeps its
        activations, too, and one for all that recompute them when the gradient is there.
        """
        stages = self._of_rank[rank]
        free = self._slots[rank] - self._graphs[rank]
        may_begin = self._under_way[rank] + 1 <= self._most_under_way[rank]
        kept = again = 0
        best: tuple[int, Action] | None = None
        for s in reversed(stages):
            stage = self._stages[s]
            found = self._choose(stage, now, free, free - kept - again, may_begin)
            if found is not None and (best is None or found[0] < best[0]):
                kind, op, m = found
                best = kind, Action(s, op, m)
            if not stage.graphs:
                if stage.backward < stage.kept:
                    kept += 1
                else:
                    again = 1
        return best[1] if best is not None else None

    @staticmethod
    def _choose(
        stage: _Progress, now: float, free: float, room: float, may_begin: bool
    ) -> tuple[int, Op, int] | None:
        """What a stage does now, with a number that is the smaller the better that is."""
        m = stage.backward
        if m < stage.forward and m < stage.recompute and stage.gradients[m] <= now:
            if stage.split_from <= m < stage.whole_from:
                return 0, "I", m
            return (0, "B", m) if stage.weights == m else (0, "W", stage.weights)
        m = stage.recompute
        again = m < stage.forward
        if again and free >= 1 and stage.gradients[m] <= now:
            return 1, "R", m
        m = stage.forward
        has_room = m >= stage.kept or room >= 1
        if m < len(stage.inputs) and may_begin and has_room and stage.inputs[m] <= now:
            return 2, "F", m
        if again and room >= 1:
            return 3, "R", stage.recompute
        if stage.weights < stage.backward:
            return 4, "W", stage.weights
        return None

    def _do(self, action: Action, rank: int, end: float) -> tuple[float, int]:
        """Note what an action does. Returns when which rank hears of it."""
        s, op, m = action
        stage = self._stages[s]
        match op:
            case "F":
                stage.forward += 1
                self._under_way[rank] += 1
                self._hold(stage, rank, int(m < stage.kept))
                if s < self._last:
                    return self._hand_on(self._stages[s + 1].inputs, m, rank, s + 1, end)
                stage.gradients[m] = end
            case "R":
                stage.recompute += 1
                self._hold(stage, rank, 1)
            case "B" | "I":
                stage.backward += 1
                self._under_way[rank] -= 1
                if op == "B":
                    stage.weights += 1
                    self._hold(stage, rank, -1)
                if s:
                    return self._hand_on(self._stages[s - 1].gradients, m, rank, s - 1, end)
            case "W":
                stage.weights += 1
                self._hold(stage, rank, -1)
        return end, rank

    def _hold(self, stage: _Progress, rank: int, graphs: int) -> None:
        """Note that a stage holds the activations of more micro-batches, or of fewer."""
        stage.graphs += graphs
        self._graphs[rank] += graphs

    def _hand_on(
        self, arrivals: list[float], m: int, rank: int, target: int, end: float
    ) -> tuple[float, int]:
        there = self._placement[target]
        arrivals[m] = end + self._costs.message * (there != rank)
        return arrivals[m], there
