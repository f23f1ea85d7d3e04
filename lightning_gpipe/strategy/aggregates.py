"""Metrics that aggregate a number of each step, such as the mean of the losses.

A step per micro-batch gives them several, of which the mini-batch's is made: then they are updated
once, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_gpipe.model.remote import Where, origin_of
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.batches import merge


@dataclass(slots=True)
class _Given:
    """What a metric is given by one call in the steps of a mini-batch.

    Args:
        metric: The metric.
        run: Its forward or its update.
        is_forward: Whether it is its forward.
        where: The stages that have the numbers; None: all.
        values: By the micro-batch.
    """

    metric: Any
    run: Callable[[Any], Any]
    is_forward: bool
    where: Where | None
    values: dict[int, Any] = field(default_factory=dict)


class Aggregates:
    """What the aggregating metrics are given by the steps of a mini-batch."""

    def __init__(self) -> None:
        self._given: dict[tuple[int, bool, int], _Given] = {}
        self._calls: dict[tuple[int, bool, int], int] = {}  # by metric, kind and micro-batch

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._given.clear()
        self._calls.clear()

    def take(
        self,
        metric: Any,
        run: Callable[[Any], Any],
        is_forward: bool,
        micro_batch: int,
        value: Any,
        where: Where | None,
    ) -> None:
        """Take what a metric is given.

        Args:
            metric: The metric.
            run: Its forward or its update.
            is_forward: Whether it is its forward.
            micro_batch: In whose step.
            value: A number.
            where: The stages that have it; None: all.
        """
        call = id(metric), is_forward, micro_batch
        self._calls[call] = number = self._calls.get(call, 0) + 1
        given = self._given.setdefault((*call[:2], number), _Given(metric, run, is_forward, where))
        given.values[micro_batch] = value.detach() if isinstance(value, Tensor) else value

    def finish(
        self, trace: StepTrace, sizes: Sequence[int], weights: Sequence[Any]
    ) -> Iterator[tuple[Any, Where | None, Any]]:
        """Give each metric the mini-batch's number, where it is.

        Args:
            trace: Follows the step.
            sizes: Samples in each micro-batch.
            weights: How much each micro-batch counts.

        Yields:
            Each that was called: it, the stages that have its state, and what it returned here.
        """
        for given in self._given.values():
            result = None
            if given.where is None or trace.stage in given.where:
                # what all have must come out alike, and not all may have the weights
                is_known = given.where is not None or not any(
                    isinstance(w, Tensor) for w in weights
                )
                counts = weights if is_known else sizes
                values, ms = list(given.values.values()), list(given.values)
                parts = [sizes[m] for m in ms], [counts[m] for m in ms]
                with trace.suspended():
                    number = merge(values, *parts, f"What {type(given.metric).__name__} is given")
                    result = given.run(number)
            if given.is_forward:
                yield given.metric, given.where, result
        self.clear()


def aggregated(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number that a metric is given as the step's; None: it is given something else.

    A sum, or the largest or the smallest one, of samples is right if every micro-batch gives its
    own: there, only what is known to be a mean is the step's.
    """
    values = (*args, *kwargs.values())
    if not isinstance(metric, BaseAggregator) or len(values) != 1 or isinstance(values[0], bool):
        return None
    value = values[0]
    if isinstance(value, Tensor):
        if value.ndim:
            return None
        origin = origin_of(value)
        is_steps = origin is not None and origin.is_mean
    else:
        is_steps = type(value) is int and isinstance(metric, SumMetric)
    is_steps = is_steps or isinstance(metric, (MeanMetric, CatMetric))
    return value if is_steps and isinstance(value, (Tensor, int, float)) else None
