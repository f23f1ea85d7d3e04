"""Cuts are exact."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.plan.cut import cut
from lightning_gpipe.plan.report import expected_bubble, human
from lightning_gpipe.plan.settings import Settings


def brute_force(costs: list[float], stages: int) -> tuple[float, float]:
    """The smallest bottleneck, and the smallest sum of squares with it."""
    best = (float("inf"), float("inf"))
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [0, *inner, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        best = min(best, (max(sums), sum(s * s for s in sums)))
    return best


def score(costs: list[float], sizes: tuple[int, ...]) -> tuple[float, float]:
    ends = list(itertools.accumulate(sizes))
    sums = [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    return max(sums), sum(s * s for s in sums)


@pytest.mark.parametrize("seed", range(60))
def test_cut_is_optimal(seed: int) -> None:
    generator = random.Random(seed)
    layers = generator.randint(1, 10)
    stages = generator.randint(1, layers)
    costs = [float(generator.choice([0, 1, 2, 3, 7, 20])) for _ in range(layers)]
    sizes = cut(costs, stages)
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert min(sizes) >= 1
    assert score(costs, sizes) == brute_force(costs, stages)


def test_least_variance_among_the_best() -> None:
    assert cut([4, 1, 1, 1, 1], 3) == (1, 2, 2)
    assert cut([0, 0, 0, 0], 2) in {(1, 3), (2, 2), (3, 1)}


def test_many_layers_are_cut_at_once() -> None:
    assert sum(cut([float(i % 7) for i in range(600)], 16)) == 600


@pytest.mark.parametrize(
    ("costs", "stages", "problem"),
    [
        ([1, 2], 3, "at most 2 stages"),
        ([1, -1], 1, "not negative"),
        ([1, float("nan")], 1, "finite"),
    ],
)
def test_bad_costs(costs: list[float], stages: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        cut(costs, stages)


def test_partition() -> None:
    partition = Partition((1, 3), (5.0, 1.0, 2.0, 2.0), "flops")
    assert partition.stages == ((range(1),), (range(1, 4),))
    assert [partition.stage_of(i) for i in range(4)] == [0, 1, 1, 1]
    assert partition.shares == (0.5, 0.5)
    settings = Settings(4, 2, None, "params", "never", deferred_batch_norm=True)
    assert expected_bubble(partition, 4, settings) == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (999_949, "999.9 K"),
        (999_999, "1.0 M"),
        (25_600_000, "25.6 M"),
        (999_999_999, "1.0 B"),
        (7_000_000_000_000, "7000.0 B"),
    ],
)
def test_counts_are_rounded_before_their_unit_is_chosen(count: int, text: str) -> None:
    assert human(count) == text
