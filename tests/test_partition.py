"""Cuts are exact."""

from __future__ import annotations

import itertools
import random
import time
from functools import partial

import pytest
from torch import nn

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.cut import LimitTooLow, cut
from lightning_gpipe.plan.report import expected_bubble, human
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.simulate import simulate


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


def limited(
    costs: list[float], stages: int, memories: list[int], limit: int
) -> tuple[float, float] | None:
    """As `brute_force`, over the cuts within the limit; None: there is none."""
    found = []
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [*itertools.pairwise([0, *inner, len(costs)])]
        if all(sum(memories[a:b]) <= limit for a, b in bounds):
            found.append(score(costs, tuple(b - a for a, b in bounds)))
    return min(found, default=None)


def test_cut_is_optimal_within_a_limit_of_memory() -> None:
    generator, refused = random.Random(0), 0
    for _ in range(1000):
        stages = generator.randint(1, 5)
        layers = generator.randint(stages, 9)
        costs = [float(generator.choice([0, 0, 1, 1, 2, 3, 7, 20])) for _ in range(layers)]
        memories = [generator.choice([0, 1, 1, 2, 5, 9]) for _ in range(layers)]
        limit = generator.randint(0, max(1, 2 * sum(memories) // stages))
        best = limited(costs, stages, memories, limit)
        if best is not None:
            sizes = cut(costs, stages, memories, limit)
            ends = [*itertools.accumulate(sizes)]
            assert (len(sizes), ends[-1], min(sizes) >= 1) == (stages, layers, True)
            held = [sum(memories[e - n : e]) for n, e in zip(sizes, ends, strict=True)]
            assert max(held) <= limit
            assert score(costs, sizes) == best
            continue
        refused += 1
        with pytest.raises(LimitTooLow) as error:
            cut(costs, stages, memories, limit)
        least = error.value.least
        assert limited(costs, stages, memories, int(least)) is not None
        assert limited(costs, stages, memories, int(least) - 1) is None
        assert f"{stages} stages fit within {least} bytes" in str(error.value)
        assert ("alone" in str(error.value)) == (max(memories) > limit)
    assert 200 < refused < 800


def test_the_layer_that_alone_is_above_the_limit_is_named() -> None:
    with pytest.raises(ValueError, match=r"layer 2 alone holds 3,000 bytes.*fit within 3,000"):
        cut([1, 1, 1, 1], 2, [500, 10, 3000, 0], 2000)
    with pytest.raises(ValueError, match=r"hold more together.*more stages.*fit within 3,000"):
        cut([1, 1, 1, 1], 2, [2000, 1000, 2000, 1000], 2500)


def test_virtual_stages_share_a_limit() -> None:
    layers = [nn.Linear(1, 1) for _ in range(8)]
    settings = Settings(4, 2, None, "params", "never", deferred_batch_norm=True, virtual_stages=2)
    share_out = partial(Balancing(layers, run_layer, None, list, print).partition, 2, settings)
    memories = [1, 1, 1, 1, 1, 1, 1, 5]
    assert share_out(memories, 11).sizes == (3, 2, 2, 1)
    assert share_out(memories, 12).sizes == (2, 2, 2, 2)
    with pytest.raises(ValueError, match=r"2 of each stage.*10 bytes would do for a stage"):
        share_out(memories, 9)


def test_many_layers_are_cut_at_once() -> None:
    """Also where one layer is as expensive as all others, so that almost any cut is as good."""
    start = time.thread_time()
    for costs in [float(i % 7) for i in range(1000)], [1.0] * 999 + [1000.0]:
        assert sum(cut(costs, 64)) == 1000
        assert sum(cut(costs, 64, [i % 5 for i in range(1000)], 200)) == 1000
    assert time.thread_time() - start < 8


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


def test_the_expected_bubble_is_that_of_the_replicas_schedule() -> None:
    settings = Settings(8, 4, None, "params", "never", deferred_batch_norm=True, step="micro-batch")
    partition = Partition((1, 1, 1, 1), (1.0, 1.0, 1.0, 1.0), "flops")
    alone, two = (expected_bubble(partition, 8, settings, replicas) for replicas in (1, 2))
    for replicas, found in (1, alone), (2, two):
        schedule = Schedules.unmeasured(settings, partition, replicas).make(8)
        assert found == simulate(schedule, Costs.of(partition.part_shares)).bubble
    assert two > alone  # whose last backwards are split


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
