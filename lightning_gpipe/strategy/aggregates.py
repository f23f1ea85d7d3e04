"""Metrics that aggregate a number of each step, such as the mean of the losses.

A step per micro-batch gives them several, of which the mini-batch's is made: then they are updated
once, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_gpipe.model.means import is_known_mean
from lightning_gpipe.model.remote import Where
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.merging import merge
from lightning_gpipe.strategy.recipes import Recipe
from lightning_gpipe.strategy.step_values import StepValues


@dataclass(slots=True)
class _Given:
    """What a metric is given by one call in the steps of a mini-batch.

    Args:
        metric: The metric.
        run: Its forward or its update.
        is_forward: Whether it is its forward.
        where: The stages that have the numbers; None: all.
        values: By the micro-batch.
        recipes: How these come about.
        counts: How much each is to count in a mean, where the step says so.
    """

    metric: Any
    run: Callable[..., Any]
    is_forward: bool
    where: Where | None
    values: dict[int, Any] = field(default_factory=dict)
    recipes: list[Recipe | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Aggregates:
    """What the aggregating metrics are given by the steps of a mini-batch.

    Args:
        made: What steps make of metrics and of means.
    """

    def __init__(self, made: StepValues) -> None:
        self._made = made
        self._given: dict[tuple[int, bool, int], _Given] = {}
        self._calls: dict[tuple[int, bool, int], int] = {}  # by metric, kind and micro-batch

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._given.clear()
        self._calls.clear()

    def take(
        self,
        metric: Any,
        run: Callable[..., Any],
        is_forward: bool,
        micro_batch: int,
        values: tuple[Any, ...],
        where: Where | None,
    ) -> None:
        """Take what a metric is given.

        Args:
            metric: The metric.
            run: Its forward or its update.
            is_forward: Whether it is its forward.
            micro_batch: In whose step.
            values: A number, and how much it counts in a mean, if that is given.
            where: The stages that have it; None: all.
        """
        call = id(metric), is_forward, micro_batch
        self._calls[call] = number = self._calls.get(call, 0) + 1
        given = self._given.setdefault((*call[:2], number), _Given(metric, run, is_forward, where))
        value, *counts = values
        given.counts += counts
        given.recipes.append(self._made.recipe_of(value))
        # the step may change it in place
        own = value.detach().clone() if isinstance(value, Tensor) else value
        given.values[micro_batch] = own

    def finish(
        self, trace: StepTrace, sizes: Sequence[int], weights: Sequence[Any]
    ) -> Iterator[tuple[Any, Where | None]]:
        """Give each metric the mini-batch's number, where it is.

        Args:
            trace: Follows the step.
            sizes: Samples in each micro-batch.
            weights: How much each micro-batch counts.

        Yields:
            Each that was called, and the stages that have its state.
        """
        for given in self._given.values():
            if given.where is None or trace.stage in given.where:
                # what all have must come out alike, and not all may have the weights
                is_known = given.where is not None or not any(
                    isinstance(w, Tensor) for w in weights
                )
                counts = weights if is_known else sizes
                values, ms = list(given.values.values()), list(given.values)
                own, what = [counts[m] for m in ms], f"What {type(given.metric).__name__} is given"
                adds = isinstance(values[0], Tensor) and not values[0].is_floating_point()
                with trace.suspended():
                    number = self._made.of_mini_batch(given.recipes, own, what, adds)
                    if number is None:
                        number = merge(values, [sizes[m] for m in ms], own, what)
                    weight = (sum(given.counts),) if given.counts else ()
                    given.run(number, *weight)
            if given.is_forward:
                yield given.metric, given.where
        self.clear()


def aggregated(measure: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a metric or a collection is given as the step's; nothing: it is given other.

    Returns:
        A number; and how much it counts, where that is said in whole numbers, as those of samples,
        which are added up over micro-batches. (What is counted in a tensor, such as a mask's sum,
        belongs to the micro-batch's own number.)

    Raises:
        ValueError: If it is the step's for some metrics of a collection alone.
    """
    values = (*args, *kwargs.values())
    if isinstance(measure, MeanMetric) and len(values) == 2:
        number = args[0] if args else kwargs.get("value")
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        return (number, weight) if type(weight) is int and _is_steps(measure, number) else ()
    if len(values) != 1 or isinstance(values[0], bool):
        return ()
    metrics = [*measure.children()] if isinstance(measure, MetricCollection) else [measure]
    are_steps = {_is_steps(metric, values[0]) for metric in metrics}
    if len(are_steps) > 1:
        raise ValueError(
            f"A {type(measure).__name__} of {', '.join(type(m).__name__ for m in metrics)} is given"
            " a number that may not be a mean over samples. With step='micro-batch' a mean of it"
            " takes that of the mini-batch, others take those of the micro-batches: call the"
            " metrics one by one, or use GPipeStrategy(step='mini-batch')."
        )
    return values if are_steps == {True} else ()


def _is_steps(metric: Any, value: Any) -> bool:
    """Whether what a metric is given is the step's number.

    A sum, or the largest or the smallest one, of samples is right if every micro-batch gives its
    own: there, only what is known to be a mean is the step's.
    """
    if not isinstance(metric, BaseAggregator) or not isinstance(value, (Tensor, int, float)):
        return False
    if isinstance(value, Tensor) and value.ndim:
        return False
    if isinstance(metric, (MeanMetric, CatMetric)):
        return True
    if isinstance(value, Tensor):
        return is_known_mean(value)
    return type(value) is int and isinstance(metric, SumMetric)
