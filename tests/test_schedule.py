"""Schedules are data: written out, checked, replayed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_gpipe.schedule.actions import CHECKPOINT_MODES, Action, Checkpoint, kept_graphs
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.gpipe import fill_drain, forward_only
from lightning_gpipe.schedule.simulate import grid, simulate

SWEEP = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 32), CHECKPOINT_MODES))


def program(text: str) -> tuple[Action, ...]:
    return tuple(Action(word[0], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("always", "F0 F1 F2 R2 B2 R1 B1 R0 B0"),
        ("except_last", "F0 F1 F2 B2 R1 B1 R0 B0"),
        ("never", "F0 F1 F2 B2 B1 B0"),
    ],
)
def test_fill_drain(mode: Checkpoint, expected: str) -> None:
    assert fill_drain(2, 3, mode) == (program(expected), program(expected))
    assert " ".join(map(repr, program(expected))) == expected


def test_forward_only() -> None:
    assert forward_only(2, 3) == (program("F0 F1 F2"),) * 2
    validate(forward_only(2, 3))


def test_grid() -> None:
    assert grid(fill_drain(3, 3, "always")) == (
        "stage 0 | F0 F1 F2 R2             B2 R1 B1 R0 B0\n"
        "stage 1 |    F0 F1 F2 R2       B2 R1 B1 R0 B0\n"
        "stage 2 |       F0 F1 F2 R2 B2 R1 B1 R0 B0"
    )


@pytest.mark.parametrize(("stages", "micro_batches", "mode"), SWEEP)
def test_every_schedule_is_valid(stages: int, micro_batches: int, mode: Checkpoint) -> None:
    schedule = fill_drain(stages, micro_batches, mode)
    validate(schedule)
    kept = len(kept_graphs(schedule[0]))
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


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        (["F0 F0"], "stage 0 runs F0 twice"),
        (["B0 F0"], "stage 0 runs B0 before F0"),
        (["F0 B0 R0"], "stage 0 runs R0 after B0"),
        (["R0 F0 B0"], "stage 0 runs R0 before F0"),
        (["F0 F1", "F1 F0"], r"stage 0 sends F in the order \[0, 1\], stage 1 expects \[1, 0\]"),
        (["F0 F1", "F0"], "stage 0 sends F in the order"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "waits for ever at"),
    ],
)
def test_invalid_schedules_are_named(programs: list[str], problem: str) -> None:
    schedule: Any = tuple(map(program, programs))
    with pytest.raises(ValueError, match=problem) as error:
        validate(schedule)
    assert f"stage 0: {programs[0]}" in str(error.value)
