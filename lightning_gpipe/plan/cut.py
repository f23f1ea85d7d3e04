"""Cuts a sequence of layers into stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

_INFINITE = float("inf")


class LimitTooLow(ValueError):
    """No cut keeps every stage within the limit of memory.

    Args:
        least: The smallest limit, in bytes, within which there is one.
        text: What to say of it.
    """

    def __init__(self, least: float, text: str) -> None:
        super().__init__(text)
        self.least = least


def cut(
    costs: Sequence[float],
    stages: int,
    memories: Sequence[float] | None = None,
    limit: float | None = None,
) -> tuple[int, ...]:
    """Cut layers into stages of consecutive layers, exactly.

    Minimises the cost of the most expensive stage, which is the pipeline's speed; among all such
    cuts it minimises the variance of the stages' costs (GPipe §2.2).

    Args:
        costs: Cost of each layer, not negative.
        stages: K; every stage gets at least one layer.
        memories: Bytes of each layer, not negative.
        limit: The most bytes that the layers of a stage may hold together; None: any number.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: If there are fewer layers than stages, or a cost or a memory is negative or not
            finite.
        LimitTooLow: If no cut keeps every stage within the limit.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers can't be cut into {stages} stages: use at most {layers} stages."
        )
    _check("costs", costs)
    prefix = [0.0, *accumulate(costs)]
    starts = [0] * (layers + 1)
    if memories is not None and limit is not None:
        starts = _starts_within(memories, limit, stages, layers)
    bottleneck = _bottleneck(prefix, stages, starts)
    starts = [max(pair) for pair in zip(starts, _starts(prefix, bottleneck), strict=True)]
    # least[i]: smallest sum of squares of `k` stages over the first i layers, none above a limit
    least = [0.0] + [_INFINITE] * layers
    choices: list[list[int]] = []
    for k in range(1, stages + 1):
        least, choice = _one_stage_more(least, prefix, starts, k, layers - (stages - k))
        choices.append(choice)
    bounds = [layers]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    bounds.reverse()
    return tuple(end - start for start, end in pairwise(bounds))


def _check(what: str, values: Sequence[float]) -> None:
    if any(not 0 <= value < _INFINITE for value in values):
        raise ValueError(f"Layer {what} must be finite and not negative, got {list(values)}.")


def _starts(prefix: Sequence[float], limit: float) -> list[int]:
    """For each i the first layer from which those up to the i-th are within a limit together."""
    starts, j = [], 0
    for i in range(len(prefix)):
        while prefix[i] - prefix[j] > limit:
            j += 1
        starts.append(j)
    return starts


def _starts_within(memories: Sequence[float], limit: float, stages: int, layers: int) -> list[int]:
    """As :func:`_starts`, of memory, once it is known that a cut exists."""
    if len(memories) != layers:
        raise ValueError(f"Got memories of {len(memories)} layers and costs of {layers}.")
    _check("memories", memories)
    held = [0, *accumulate(memories)]
    least = _bottleneck(held, stages, [0] * (layers + 1))
    if least <= limit:
        return _starts(held, limit)
    largest = max(range(layers), key=memories.__getitem__)
    if memories[largest] > limit:
        why = f"layer {largest} alone holds {memories[largest]:,} bytes. Split this layer"
    else:
        why = "their layers hold more together. Use more stages"
    raise LimitTooLow(
        least,
        f"No cut into {stages} stages keeps each within {limit:,} bytes: {why}, have activations"
        " recomputed (checkpoint='always'), use smaller micro-batches, or raise the limit:"
        f" {stages} stages fit within {least:,} bytes each.",
    )


def _bottleneck(prefix: Sequence[float], stages: int, starts: Sequence[int]) -> float:
    """Smallest possible cost of the most expensive stage.

    Args:
        prefix: Costs of the first i layers.
        stages: K.
        starts: For each i the first layer with which a stage may begin that ends with the i-th;
            grows with i.

    Returns:
        Infinity where there is no cut.
    """
    low, high = 0.0, _fill(prefix, stages, starts, prefix[-1])[0]
    while low < high < _INFINITE:
        middle = (low + high) / 2
        found, following = _fill(prefix, stages, starts, middle if middle < high else low)
        if found < _INFINITE:
            high = found
        else:
            low = following
    return high


def _fill(
    prefix: Sequence[float], stages: int, starts: Sequence[int], limit: float
) -> tuple[float, float]:
    """Give each stage as many layers as stay within a limit; fewer stages may be cut further.

    Returns:
        The cost of the most expensive stage, infinity if layers are left; and the smallest limit
        with which a stage would get more layers.
    """
    start, most, following, layers = 0, 0.0, _INFINITE, len(prefix) - 1
    for _ in range(stages):
        before, last = prefix[start], bisect_right(starts, start) - 1  # it may end with the last
        end = bisect_right(prefix, limit, start, last + 1, key=lambda p: p - before) - 1
        if end < last:
            following = min(following, prefix[end + 1] - before)
        most, start = max(most, prefix[end] - before), end
    return (most if start == layers else _INFINITE), following


def _one_stage_more(
    least: Sequence[float], prefix: Sequence[float], starts: Sequence[int], k: int, last: int
) -> tuple[list[float], list[int]]:
    """The smallest sums of squares of `k` stages, and where the k-th begins, from those of k - 1.

    With more layers the best k-th stage begins no earlier: squares of sums are a Monge array, and
    stay one where limits rule out the longest stages. So a row tells where others needn't look.

    Args:
        least: The sums of one stage fewer over the first j layers; infinity: there is no cut.
        prefix: Costs of the first i layers.
        starts: See :func:`_bottleneck`; grows with i.
        k: The stage.
        last: The most layers that the k stages may have together.
    """
    following, choice = [_INFINITE] * len(prefix), [0] * len(prefix)
    spans = [(k, last, k - 1, last - 1)]  # rows, and where the k-th stage may begin in them
    while spans:
        low, high, first, final = spans.pop()
        if low > high:
            continue
        i = (low + high) // 2
        for j in range(max(first, starts[i]), min(final, i - 1) + 1):
            cost = prefix[i] - prefix[j]
            if least[j] + cost * cost <= following[i]:
                following[i], choice[i] = least[j] + cost * cost, j
        if following[i] == _INFINITE:  # and so are those of more layers
            spans.append((low, i - 1, first, final))
        else:
            spans += [(low, i - 1, first, choice[i]), (i + 1, high, choice[i], final)]
    return following, choice
