"""Schedules are data: written out, checked, replayed."""

from __future__ import annotations

import itertools
import re

import pytest

from lightning_gpipe.schedule.actions import (
    CHECKPOINT_MODES,
    Action,
    Checkpoint,
    Program,
    Schedule,
    kept_graphs,
)
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.gpipe import fill_drain, forward_only
from lightning_gpipe.schedule.simulate import grid, simulate

SWEEP = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 32), CHECKPOINT_MODES))


def program(text: str) -> Program:
    """The program that is written as its actions' ``repr``."""
    words = [re.fullmatch(r"(\d+)([A-Z])(\d+)", word) for word in text.split()]
    return tuple(Action(int(w[1]), w[2], int(w[3])) for w in words if w)  # type: ignore[arg-type]


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
    schedule = fill_drain(2, 3, mode)
    assert schedule == one_stage_each(
        expected.replace("1F", "0F").replace("1R", "0R").replace("1B", "0B"), expected
    )
    assert " ".join(map(repr, schedule.programs[1])) == expected


def test_forward_only() -> None:
    assert forward_only(2, 3) == one_stage_each("0F0 0F1 0F2", "1F0 1F1 1F2")
    validate(forward_only(2, 3))


def test_grid() -> None:
    assert grid(fill_drain(3, 3, "always")) == (
        "rank 0 | 0F0 0F1 0F2 0R2                 0B2 0R1 0B1 0R0 0B0\n"
        "rank 1 |     1F0 1F1 1F2 1R2         1B2 1R1 1B1 1R0 1B0\n"
        "rank 2 |         2F0 2F1 2F2 2R2 2B2 2R1 2B1 2R0 2B0"
    )


@pytest.mark.parametrize(("stages", "micro_batches", "mode"), SWEEP)
def test_every_schedule_is_valid(stages: int, micro_batches: int, mode: Checkpoint) -> None:
    schedule = fill_drain(stages, micro_batches, mode)
    validate(schedule)
    kept = len(kept_graphs(schedule.programs[0]))
    assert kept == {"always": 0, "except_last": 1, "never": micro_batches}[mode]


@pytest.mark.parametrize(("stages", "micro_batches"), {case[:2] for case in SWEEP})
def test_lengths_are_the_papers(stages: int, micro_batches: int) -> None:
    k, m, f, r, b = stages, micro_batches, 2.0, 3.0, 5.0
    never = simulate(fill_drain(k, m, "never"), f, b, r)
    assert never.length == pytest.approx((m + k - 1) * (f + b))
    assert never.bubble == pytest.approx((k - 1) / (m + k - 1))
    always = simulate(fill_drain(k, m, "always"), f, b, r)
    # the first recompute fills the time in which the first gradient is on its way
    assert always.length == pytest.approx((m + k - 1) * f + m * (r + b) + (k - 1) * b)
    assert always.peak_graphs == (1,) * k
    assert always.peak_inputs == (m,) * k
    assert never.peak_graphs == (m,) * k
    assert never.peak_inputs == (0,) * k


def test_the_slowest_stage_sets_the_pace() -> None:
    simulation = simulate(fill_drain(3, 10, "never"), [1, 4, 1], [2, 8, 2])
    assert simulation.length == pytest.approx(1 + 10 * 4 + 10 * 8 + 1 + 1 + 2 + 2 - 1)
    assert simulation.bubble == pytest.approx(1 - 180 / (3 * simulation.length))


def test_a_backward_takes_twice_the_time_of_a_forward_unless_told_otherwise() -> None:
    schedule = fill_drain(2, 3, "never")
    assert simulate(schedule, [1, 3]) == simulate(schedule, [1, 3], [2, 6])


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
    simulation = simulate(INTERLEAVED, 1.0, 2.0)
    assert len(simulation.spans) == 4 * 4 * 2
    assert simulation.peak_graphs[0] > simulation.peak_graphs[1]
    assert simulation.bubble < simulate(fill_drain(2, 4, "never"), 2.0, 4.0).bubble
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
