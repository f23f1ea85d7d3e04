"""Schedules are data: written out, checked, replayed."""

from __future__ import annotations

import itertools
import math
import random
import re
import tracemalloc
from functools import cache
from typing import TypeAlias

import pytest

from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.actions import (
    Action,
    Program,
    Schedule,
    kept_graphs,
    upstream_of,
)
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint, recomputed
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import (
    chained,
    fill_drain,
    forward_only,
    in_turn,
    without_backwards,
)
from lightning_gpipe.schedule.one_f_one_b import one_f_one_b
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.search import held, search
from lightning_gpipe.schedule.simulate import peak_graphs, receives, simulate

SWEEP = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 32), CHECKPOINT_MODES))


def program(text: str) -> Program:
    """The program that is written as its actions' ``repr``."""
    words = [re.fullmatch(r"(\d+)([A-Z])(\d+)", word) for word in text.split()]
    return tuple(Action(int(w[1]), w[2], int(w[3])) for w in words if w)  # type: ignore[arg-type]


def there_and_back(ranks: int) -> tuple[int, ...]:
    """Two stages a rank: from the first rank to the last, and back to the first."""
    return (*range(ranks), *reversed(range(ranks)))


def grid(schedule: Schedule) -> str:
    """Draw a schedule: a row a rank, a column a unit of time, every action taking one."""
    stages = len(schedule.placement)
    spans = simulate(schedule, Costs(*[(1.0,) * stages] * 5)).spans
    rows = [["   "] * round(max(span.end for span in spans)) for _ in schedule.programs]
    for span in spans:
        rows[span.rank][round(span.start)] = repr(span.action)
    return "\n".join(f"rank {rank} | {' '.join(row)}".rstrip() for rank, row in enumerate(rows))


def peaks(schedule: Schedule) -> list[int]:
    """For each rank the largest number of micro-batches whose activations are held at one time."""
    return [*map(peak_graphs, schedule.programs)]


def one_stage_each(*programs: str) -> Schedule:
    return Schedule(tuple(map(program, programs)), tuple(range(len(programs))))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("always", "1F0 1F1 1F2 1R2 1B2 1R1 1B1 1R0 1B0"),
        ("except_last", "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"),
        ("never", "1F0 1F1 1F2 1B2 1B1 1B0"),
    ],
)
def test_fill_drain(mode: Checkpoint, expected: str) -> None:
    schedule = fill_drain(rounds(2), 3, mode)
    assert schedule == one_stage_each(
        expected.replace("1F", "0F").replace("1R", "0R").replace("1B", "0B"), expected
    )
    assert " ".join(map(repr, schedule.programs[1])) == expected


def test_forward_only() -> None:
    assert forward_only(rounds(2), 3) == one_stage_each("0F0 0F1 0F2", "1F0 1F1 1F2")
    validate(forward_only(rounds(2), 3))


def test_one_rank_holds_one_micro_batch() -> None:
    schedule = in_turn((0,), 3, "always")
    assert " ".join(map(repr, schedule.programs[0])) == "0F0 0B0 0F1 0B1 0F2 0B2"
    schedule = in_turn((0, 0), 2, 1)
    assert " ".join(map(repr, schedule.programs[0])) == "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0R1 0B1"
    validate(schedule)


def test_ranks_wait_for_what_is_chained() -> None:
    schedule = chained(one_f_one_b(rounds(3), 3, "never"), frozenset({0, 2}))
    assert grid(schedule) == (
        "rank 0 | 0F0         0F1 0F2             0B0 0B1 0B2\n"
        "rank 1 |     1F0         1F1 1B0 1F2     1B1 1B2\n"
        "rank 2 |         2F0 2B0     2F1 2B1 2F2 2B2"
    )


def test_what_is_chained_comes_first_with_several_stages_a_rank() -> None:
    schedule = chained(fill_drain(rounds(2, 2), 3, "never"), frozenset({1}))
    assert schedule.chained == {0, 1}
    programs = [" ".join(map(repr, program)) for program in schedule.programs]
    assert programs[0].startswith("0F0 2F0 0F1 2F1 0F2 2F2 2B2")
    assert programs[1].startswith("1F0 3F0 1F1 3F1 1F2 3F2 3B2")


@pytest.mark.parametrize("name", ["searched", "interleaved", "fill_drain"])
def test_what_is_chained_last_is_recomputed_too(name: str) -> None:
    settings = Settings(
        6, 2, None, "flops", "always", True, step="micro-batch", schedule=name, virtual_stages=2
    )
    schedules = Schedules(settings, rounds(2, 2), 1, Costs.of([1.0] * 4))
    assert held(schedules.make(6, new=frozenset({0, 5}))) == 0.5
    assert held(schedules.make(6, new=frozenset({0}))) <= held(schedules.make(6)) + 0.5


def test_grid() -> None:
    assert grid(fill_drain(rounds(3), 3, "always")) == (
        "rank 0 | 0F0 0F1 0F2 0R2                 0B2 0R1 0B1 0R0 0B0\n"
        "rank 1 |     1F0 1F1 1F2 1R2         1B2 1R1 1B1 1R0 1B0\n"
        "rank 2 |         2F0 2F1 2F2 2R2 2B2 2R1 2B1 2R0 2B0"
    )


@pytest.mark.parametrize(("stages", "micro_batches", "mode"), SWEEP)
def test_every_schedule_is_valid(stages: int, micro_batches: int, mode: Checkpoint) -> None:
    schedule = fill_drain(rounds(stages), micro_batches, mode)
    validate(schedule)
    kept = len(kept_graphs(schedule.programs[0]))
    assert kept == {"always": 0, "except_last": 1, "never": micro_batches}[mode]


@pytest.mark.parametrize(("stages", "micro_batches"), {case[:2] for case in SWEEP})
def test_lengths_are_the_papers(stages: int, micro_batches: int) -> None:
    k, m, f, r, b = stages, micro_batches, 2.0, 3.0, 5.0
    times = Costs.of([f] * k, [b] * k, [r] * k)
    kept, again = (fill_drain(rounds(k), m, mode) for mode in ("never", "always"))
    never, always = simulate(kept, times), simulate(again, times)
    assert never.length == pytest.approx((m + k - 1) * (f + b))
    assert never.bubble == pytest.approx((k - 1) / (m + k - 1))
    # the first recompute fills the time in which the first gradient is on its way
    assert always.length == pytest.approx((m + k - 1) * f + m * (r + b) + (k - 1) * b)
    assert peaks(again) == [1] * k
    assert peaks(kept) == [m] * k


def test_the_slowest_stage_sets_the_pace() -> None:
    simulation = simulate(fill_drain(rounds(3), 10, "never"), Costs.of([1, 4, 1], [2, 8, 2]))
    assert simulation.length == pytest.approx(1 + 10 * 4 + 10 * 8 + 1 + 1 + 2 + 2 - 1)
    assert simulation.bubble == pytest.approx(1 - 180 / (3 * simulation.length))


def test_a_backward_takes_twice_the_time_of_a_forward_unless_told_otherwise() -> None:
    schedule = fill_drain(rounds(2), 3, "never")
    told = Costs.of([1, 3], [2, 6])
    assert simulate(schedule, Costs.of([1, 3])) == simulate(schedule, told)


@pytest.mark.parametrize(
    ("checkpoint", "micro_batches", "expected"),
    [
        ("always", 4, 4),
        ("except_last", 4, 3),
        ("never", 4, 0),
        (0, 4, 0),
        (3, 4, 3),
        (9, 4, 4),
        (0.0, 4, 0),
        (0.5, 4, 2),
        (0.3, 4, 2),
        (1.0, 4, 4),
        (0.5, 3, 2),
    ],
)
def test_recomputed(checkpoint: Checkpoint, micro_batches: int, expected: int) -> None:
    assert recomputed(checkpoint, micro_batches) == expected
    again = {m for _, op, m in fill_drain((0,), micro_batches, checkpoint).programs[0] if op == "R"}
    assert again == set(range(expected)), "those that run backward first keep their activations"


#: Two stages a rank, as torch's ScheduleInterleaved1F1B runs four micro-batches.
INTERLEAVED = Schedule(
    (
        program("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"),
        program("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"),
    ),
    (0, 1, 0, 1),
)


def test_a_rank_may_run_several_stages() -> None:
    validate(INTERLEAVED)
    simulation = simulate(INTERLEAVED)
    assert len(simulation.spans) == 4 * 4 * 2
    assert peaks(INTERLEAVED)[0] > peaks(INTERLEAVED)[1]
    assert simulation.bubble < simulate(fill_drain(rounds(2), 4, "never")).bubble
    assert grid(INTERLEAVED).startswith("rank 0 | 0F0 0F1 2F0 2F1 0F2")


def test_all_stages_may_stand_on_one_rank() -> None:
    """Between stages of one rank nothing arrives in order: it is taken when it is needed."""
    order = sorted(simulate(INTERLEAVED).spans, key=lambda span: span.end)
    validate(Schedule((tuple(span.action for span in order),), (0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("programs", "placement", "problem"),
    [
        (["0F0 0F0"], (0,), "rank 0 runs 0F0 twice"),
        (["0B0 0F0"], (0,), "rank 0 runs 0B0 before 0F0"),
        (["0F0 0B0 0R0"], (0,), "rank 0 runs 0R0 after 0B0"),
        (["0R0 0F0 0B0"], (0,), "rank 0 runs 0R0 before 0F0"),
        (["0F0 1F0"], (0, 1), "rank 0 runs 1F0, whose stage is on rank 1"),
        (["0F0 1F0"], (0,), "rank 0 runs 1F0, a stage that no rank has"),
        (
            ["0F0 0F1", "1F1 1F0"],
            (0, 1),
            r"rank 0 sends \[0F0, 0F1\] in this order, rank 1 expects \[0F1, 0F0\]",
        ),
        (["0F0 0F1", "1F0"], (0, 1), r"rank 0 sends \[0F0, 0F1\]"),
        (["0F0 0F1 1F0"], (0, 0), r"rank 0 sends \[0F0, 0F1\]"),
        (["0F0 0W0 0I0"], (0,), "rank 0 runs 0W0 before 0I0"),
        (["0F0 0I0"], (0,), "rank 0 runs 0I0, and not the rest of its backward"),
        (["0F0 0I0 0B0"], (0,), "rank 0 runs 0B0 after 0I0"),
        (["0F0 0I0 0R0 0W0"], (0,), "rank 0 runs 0R0 after 0I0"),
        (
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1I1 1I0 1W0 1W1"],
            (0, 1),
            r"rank 1 sends \[1I1, 1I0\] in this order, rank 0 expects \[1I0, 1I1\]",
        ),
        (["0F0 0I0 0W0", "1F0 1B0"], (0, 1), None),
        (["0F0 2F0 0F1 2F1", "1F0 1F1"], (0, 1, 0), None),
        (["2F0 0F0", "1F0"], (0, 1, 0), "rank 0 waits for ever at 2F0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], (0, 1), "waits for ever at"),
    ],
)
def test_invalid_schedules_are_named(
    programs: list[str], placement: tuple[int, ...], problem: str | None
) -> None:
    schedule = Schedule(tuple(map(program, programs)), placement)
    if problem is None:
        validate(schedule)
        return
    with pytest.raises(ValueError, match=problem) as error:
        validate(schedule)
    assert f"rank 0: {programs[0]}" in str(error.value)


INTERLEAVED_SWEEP = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 3, 5, 8, 32)))


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), INTERLEAVED_SWEEP)
def test_fill_drain_and_1f1b_run_to_their_end(ranks: int, virtual: int, micro_batches: int) -> None:
    placement = rounds(ranks, virtual)
    for mode in (*CHECKPOINT_MODES, 2, 0.5):
        validate(fill_drain(placement, micro_batches, mode))
        validate(fill_drain(placement, micro_batches, mode, ascending=True))
        one = one_f_one_b(placement, micro_batches, mode)
        validate(one)
        assert [len(p) for p in forward_only(placement, micro_batches).programs] == (
            [virtual * micro_batches] * ranks
        )
    if virtual == 1:
        most = [min(ranks - rank, micro_batches) for rank in range(ranks)]
        assert peaks(one_f_one_b(placement, micro_batches, "never")) == most


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds_", [1, 2, 5])
def test_1f1b_is_as_long_as_the_papers_say(ranks: int, rounds_: int) -> None:
    """(K - 1) (f + b) / V of the time is bubble (Narayanan et al. 2021, section 2.2)."""
    micro_batches = rounds_ * ranks
    for virtual in (1, 2, 4):
        placement = rounds(ranks, virtual)
        costs = Costs.of([1 / virtual] * len(placement))
        length = simulate(one_f_one_b(placement, micro_batches, "never"), costs).length
        assert length == pytest.approx(3 * micro_batches + 3 * (ranks - 1) / virtual)


def test_looped_fill_drain_is_shorter() -> None:
    """Breadth first, the bubble is divided by V where M >= K (Lamy-Poirier 2023)."""
    for virtual in (1, 2, 4):
        placement = rounds(4, virtual)
        costs = Costs.of([1 / virtual] * len(placement))
        length = simulate(fill_drain(placement, 8, "never"), costs).length
        assert length == pytest.approx(3 * 8 + 3 * 3 / virtual)


def test_there_and_back() -> None:
    validate(fill_drain(there_and_back(3), 4, "always"))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "mode", "limit", "at_work"),
    [
        (4, 8, "always", 2, 0.96),
        (8, 32, "always", 2, 0.96),
        (4, 8, "never", 4, 0.94),
        (8, 32, "never", 8, 0.94),
    ],
)
def test_what_the_search_reaches(
    ranks: int, micro_batches: int, mode: Checkpoint, limit: int, at_work: float
) -> None:
    """Share of the time that every rank works, with two stages a rank and f = r = i = w."""
    placement = rounds(ranks, 2)
    costs = Costs.of([0.5] * len(placement))
    found = search(placement, micro_batches, mode, costs, limit)
    validate(found)
    length = simulate(found, costs).length
    assert (4 if mode == "always" else 3) * micro_batches / length > at_work
    assert held(found) <= limit


@pytest.mark.parametrize("micro_batches", [8, 32])
def test_the_search_holds_no_more_than_it_gains_by(micro_batches: int) -> None:
    """Two ranks are as fast with half a micro-batch's activations, those of one of two stages."""
    found = search(rounds(2, 2), micro_batches, "always", Costs.of([1.0] * 4), limit=2)
    assert held(found) == 0.5
    assert not any(action.op == "W" for program in found.programs for action in program)


@pytest.mark.parametrize("micro_batches", [8, 32])
def test_only_those_backwards_are_split_that_others_wait_for(micro_batches: int) -> None:
    """On two ranks a few of the last ones: as short as if all were, and no more is held."""
    costs = Costs((1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    every = search(rounds(2), micro_batches, "never", costs, limit=4, splits_all=True)
    some = search(rounds(2), micro_batches, "never", costs, limit=4)
    assert all(action.op != "B" for program in every.programs for action in program)
    assert sum(action.op == "W" for program in some.programs for action in program) <= 3
    lengths = simulate(some, costs).length, simulate(every, costs).length
    assert lengths[0] == lengths[1] == 3 * micro_batches + 1
    assert held(some) <= 4


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 32), (8, 32)])
def test_the_next_mini_batch_fills_the_pipeline_while_this_one_drains_it(
    ranks: int, micro_batches: int
) -> None:
    """Where 2 K micro-batches may be held no rank is ever idle, if none waits at a step's end."""
    costs = Costs.of([1.0] * ranks)
    found = search(rounds(ranks), micro_batches, "never", costs, limit=2 * ranks)
    work, found_alone = 3 * micro_batches, simulate(found, costs)
    assert found_alone.length == pytest.approx(work + ranks - 1, rel=0.01)
    assert found_alone.period == pytest.approx(work, rel=0.01)
    times = 5
    programs = tuple(
        tuple(
            action._replace(micro_batch=action.micro_batch + step * micro_batches)
            for step in range(times)
            for action in program
        )
        for program in found.programs
    )
    several = simulate(Schedule(programs, found.placement), costs)
    assert several.length == found_alone.length + (times - 1) * found_alone.period


Case: TypeAlias = tuple[tuple[int, ...], int, Checkpoint, Costs, float]


def random_case(number: int) -> Case:
    draw = random.Random(number)
    ranks, virtual = draw.randint(1, 6), draw.choice((1, 1, 2, 3))
    placement = rounds(ranks, virtual) if draw.random() < 0.7 else there_and_back(ranks)
    stages, wide = len(placement), draw.choice((0.01, 0.3, 0.9))

    def times(mean: float) -> tuple[float, ...]:
        return tuple(mean * draw.uniform(1 - wide, 1 + wide) for _ in range(stages))

    i, w = times(1.0), times(1.0)
    whole = tuple(map(sum, zip(i, w, strict=True)))
    message = draw.choice((0.0, 0.05, 0.5))
    costs = Costs(times(1.0), times(1.0), whole, i, w, message)
    micro_batches = draw.randint(1, 12)
    mode = draw.choice((*CHECKPOINT_MODES, draw.randint(0, micro_batches), draw.random()))
    limit = draw.choice((1, 2, 3, ranks, math.inf))
    return placement, micro_batches, mode, costs, limit


@cache
def random_search(number: int) -> tuple[Case, Schedule]:
    """A random case, and what a search finds."""
    case = random_case(number)
    return case, search(*case)


def test_a_backward_that_was_disturbed_is_not_split() -> None:
    """Whole ones were measured while the processor did something else, too."""
    times = {"F": 1.0, "R": 1.0, "B": 2.6, "I": 1.0, "W": 1.0}
    costs = Costs.measured({(s, op): t for s in range(2) for op, t in times.items()}, 2)
    assert costs.backward == (2.0, 2.0)
    found = search((0, 1), 8, "always", costs, 1.0)
    assert {action.op for program in found.programs for action in program} == {"F", "R", "B"}


@pytest.mark.parametrize("number", range(0, 125, 25))
def test_fuzz_of_searched_programs(number: int) -> None:
    for case, found in map(random_search, range(number, number + 25)):
        placement, micro_batches, mode, costs, limit = case
        validate(found)
        assert held(found) <= limit, case
        length = simulate(found, costs).length
        others = [fill_drain(placement, micro_batches, mode, ascending=True)]
        if placement == rounds(max(placement) + 1, placement.count(0)):
            others.append(one_f_one_b(placement, micro_batches, mode))
        for other in others:
            if held(other) <= limit:
                assert length <= simulate(other, costs).length + 1e-9, case
        for program in found.programs:
            for stage in range(len(placement)):
                for ops in ("F", "BI", "BW"):
                    order = [m for s, op, m in program if s == stage and op in ops]
                    assert order == sorted(order)


def operations(schedule: Schedule, rank: int) -> list[tuple[str, Action]]:
    """The messages that a rank sends and receives, in the order in which it issues them."""
    found, arrivals, placement = [], receives(schedule, rank), schedule.placement
    for action in schedule.programs[rank]:
        found += [("receive", message) for message in arrivals.get(action, ())]
        stage, op, _ = action
        target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(op, -1)
        if 0 <= target < len(placement) and placement[target] != rank:
            found.append(("send", action))
        own_last = max(stage for stage, owner in enumerate(placement) if owner == rank)
        if op == "F" and stage == own_last and action.micro_batch in schedule.chained:
            found.append(("wait for all", schedule.last_of(action)))
    return found


def runs_one_message_at_a_time(schedule: Schedule) -> bool:
    """Whether all messages arrive if each of a rank's waits for the one before it."""
    queues = [operations(schedule, rank)[::-1] for rank in range(len(schedule.programs))]
    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue and queue[-1][0] == "send":
                message = ("receive", queue[-1][1])
                other = next((q for q in queues if q and q[-1] == message), None)
                if other is None:
                    break
                queue.pop()
                other.pop()
                progress = True
        if all(q and q[-1] == queues[0][-1] and q[-1][0] == "wait for all" for q in queues):
            for queue in queues:
                queue.pop()
            progress = True
    return not any(queues)


@pytest.mark.parametrize("number", range(0, 125, 25))
def test_ranks_post_messages_in_one_order(number: int) -> None:
    for case, found in map(random_search, range(number, number + 25)):
        placement, micro_batches, mode, _, _ = case
        schedules = [found, fill_drain(placement, micro_batches, mode)]
        if placement == rounds(max(placement) + 1, placement.count(0)):
            schedules.append(one_f_one_b(placement, micro_batches, mode))
        schedules.append(without_backwards(found))
        generator = random.Random(repr(case))
        for schedule in list(schedules):
            some = [m for m in range(micro_batches) if generator.random() < 0.3]
            schedules += [chained(schedule, frozenset({0})), chained(schedule, frozenset(some))]
        for schedule in schedules:
            validate(schedule)
            assert runs_one_message_at_a_time(schedule), case
            everything = {action for program in schedule.programs for action in program}
            for rank, program in enumerate(schedule.programs):
                posted: set[Action] = set()
                arrivals = receives(schedule, rank)
                for action in program:
                    posted.update(arrivals.get(action, ()))
                    made = everything.intersection(upstream_of(action))
                    here = [s for s in made if placement[s.stage] == rank]
                    assert here or not made or posted.intersection(made), "posted before it is used"


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (2, 32), (4, 8), (4, 32)])
def test_a_search_holds_no_more_than_1f1b_where_all_is_recomputed(
    ranks: int, micro_batches: int
) -> None:
    settings = Settings(micro_batches, ranks, None, "flops", "always", True, step="micro-batch")
    placement, costs = tuple(range(ranks)), Costs.of([1.0] * (ranks - 1) + [1.3])
    schedule = Schedules(settings, placement, 1, costs).make(micro_batches)
    assert held(schedule) == held(one_f_one_b(placement, micro_batches, "always")) == 1


@pytest.mark.parametrize(("ranks", "micro_batches", "length"), [(4, 8, 27), (8, 16, 55)])
def test_messages_change_little(ranks: int, micro_batches: int, length: float) -> None:
    costs = Costs.of([1.0] * ranks, message=0.02)
    schedule = search(rounds(ranks), micro_batches, "never", costs, 1.5 * ranks)
    assert simulate(schedule, costs).length <= length + 0.02 * ranks


def test_a_search_keeps_little() -> None:
    tracemalloc.start()
    try:
        schedule = search((0, 1), 32, "always", Costs.of([1.0, 1.234]), 1)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, schedule.programs)) > 128
    assert kept < 3e5
    assert peak < 8e5
