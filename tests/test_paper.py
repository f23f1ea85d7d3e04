"""The page with the GPipe paper's tables says what its scripts compute today."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.paper import memory, plots, published, sizes, speed
from examples.paper.models import AmoebaNet, Model, Transformer, plans
from examples.paper.tables import Table, beside

ROOT = Path(__file__).parents[1]
SMALL = {"length": 16, "width": 32, "hidden": 64, "heads": 2, "vocabulary": 50}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "paper.md").read_text()


@pytest.fixture(scope="module")
def models() -> dict[str, speed.Timed]:
    return speed.models()


def test_times_are_what_the_simulator_finds(page: str, models: dict[str, speed.Timed]) -> None:
    kept = json.loads((ROOT / "docs" / "paper" / "timed.json").read_text())["throughput"]
    emulated = {
        name: {int(m): row for m, row in by_chunks.items()} for name, by_chunks in kept.items()
    }
    assert str(speed.fast(models, emulated)) in page
    for table in (speed.slow, speed.messages, speed.bubbles, speed.recomputes):
        assert str(table(models)) in page, table.__name__


@pytest.mark.parametrize(
    ("name", "make", "rows"),
    [
        ("L", Transformer, published.TRANSFORMERS[:3]),
        ("(L, D)", AmoebaNet, published.AMOEBANETS[:1]),
    ],
)
def test_models_hold_what_is_planned(page: str, name: str, make: Any, rows: Any) -> None:
    for row in sizes.of_paper(name, make, rows).rows:
        start = f"| {row[0]} | {row[1]} | {row[2]} |"
        (line,) = (line for line in page.splitlines() if line.startswith(start))
        assert numbers(line) == pytest.approx(numbers(str(Table([], [row]))), rel=0.05), row


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


@pytest.mark.parametrize("model", [Transformer(6, texts=8, **SMALL), AmoebaNet(3, 32, side=64)])
def test_plans_take_as_long_as_what_is_replayed(model: Model) -> None:
    timed = speed.Timed(model)
    for k, plan in plans(model, [1, 2, 4], 4).items():
        assert plan.length == pytest.approx(timed.run(k, 4).length)
    assert timed.run(4, 4).length < timed.late(4, 4).length
    assert timed.run(4, 4, bandwidth=1e3).length > timed.run(4, 4).length


def test_memory_is_as_the_formula_says(tmp_path: Path) -> None:
    points = memory.sweep([16], [16, 32], [2, 4], [4, 8])
    factors = memory.fitted(points)
    assert min(factors) > 0
    for point in points:
        assert memory.expected(point, factors) == pytest.approx(point.held, rel=0.1)
    assert len(memory.errors(points).rows) == 2
    plots.memory(points, tmp_path / "memory.png")
    throughput = {name: dict(rows) for name, rows in published.FAST.items()}
    plots.throughput(throughput, throughput, tmp_path / "throughput.png")
    plots.largest({"one": [("K=1", 0.3, 0.2), ("K=2", 0.0, 0.4)]}, tmp_path / "largest.png")
    assert len([*tmp_path.glob("*.png")]) == 3


def test_the_largest_transformer_fits_and_no_larger_one() -> None:
    most, limit = sizes.deepest(1, False), sizes.LIMITS["Transformer"]
    held = [plans(Transformer(depth), [1], 32)[1].most for depth in (most, most + 1)]
    assert held[0] <= limit < held[1]


def test_figures_far_apart_are_bold() -> None:
    assert beside(1.1, 1.0) == "1.10 (1.10)"
    assert beside(1.3, 1.0) == "1.30 (**1.30**)"
    assert beside(7, 10, 0) == "7 (**0.70**)"


def test_emulated_devices_sleep() -> None:
    """In a process of its own, that has computed nothing before it forks."""
    steps = "timed._steps({2: (0.5, 0.5), 4: (0.25,) * 4}, 4)"
    script = f"from examples.paper import timed; timed.FORWARD_S[4] = 0.4; print({steps})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [float(s) for s in re.findall(r": (\d+\.\d+)", done.stdout.splitlines()[-1])]
    assert steps[0] > 2.3  # (5 + 4 + 8 + 2) / 8: the schedule's own
    assert steps[1] < steps[0]
