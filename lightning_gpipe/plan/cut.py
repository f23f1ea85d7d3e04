"""Cuts a sequence of layers into stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut layers into stages of consecutive layers, exactly.

    Minimises the cost of the most expensive stage, which is the pipeline's speed; among all such
    cuts it minimises the variance of the stages' costs (GPipe §2.2).

    Args:
        costs: Cost of each layer, not negative.
        stages: K; every stage gets at least one layer.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: If there are fewer layers than stages, or a cost is negative or not finite.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers can't be cut into {stages} stages: use at most {layers} stages."
        )
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"Layer costs must be finite and not negative, got {list(costs)}.")
    prefix = [0.0, *accumulate(costs)]
    limit = _bottleneck(prefix, stages)
    # least[i]: smallest sum of squares of `k` stages over the first i layers, none above the limit
    infinite = float("inf")
    least = [0.0] + [infinite] * layers
    choices: list[list[int]] = []
    for k in range(1, stages + 1):
        following, choice = [infinite] * (layers + 1), [0] * (layers + 1)
        for i in range(k, layers - (stages - k) + 1):
            for j in range(i - 1, k - 2, -1):
                cost = prefix[i] - prefix[j]
                if cost > limit:
                    break
                if least[j] + cost * cost < following[i]:
                    following[i], choice[i] = least[j] + cost * cost, j
        least = following
        choices.append(choice)
    bounds = [layers]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    bounds.reverse()
    return tuple(end - start for start, end in pairwise(bounds))


def _bottleneck(prefix: Sequence[float], stages: int) -> float:
    """Smallest possible cost of the most expensive stage, by dynamic programming."""
    layers = len(prefix) - 1
    best = list(prefix)  # one stage over the first i layers
    for k in range(2, stages + 1):
        following = [float("inf")] * (layers + 1)
        for i in range(k, layers + 1):
            # best grows and prefix[i] - prefix[j] falls with j: the optimum is where they cross
            crossing = (
                bisect_left(
                    range(k - 1, i - 1), True, key=lambda j: best[j] >= prefix[i] - prefix[j]
                )
                + k
                - 1
            )
            following[i] = min(
                max(best[j], prefix[i] - prefix[j])
                for j in (crossing - 1, crossing)
                if k - 1 <= j <= i - 1
            )
        best = following
    return best[layers]
