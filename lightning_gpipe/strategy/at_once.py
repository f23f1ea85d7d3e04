"""Metrics of torchmetrics that look at all that a call of them gives.

Those of classification take scores for logits if any of a call is less than 0 or more than 1. In
a small micro-batch perhaps none is, so these metrics get the mini-batch's scores in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryCalibrationError,
    BinaryConfusionMatrix,
    BinaryFairness,
    BinaryGroupStatRates,
    BinaryHingeLoss,
    BinaryPrecisionRecallCurve,
    BinaryStatScores,
    MulticlassCalibrationError,
    MulticlassHingeLoss,
    MulticlassPrecisionRecallCurve,
    MultilabelConfusionMatrix,
    MultilabelCoverageError,
    MultilabelPrecisionRecallCurve,
    MultilabelRankingAveragePrecision,
    MultilabelRankingLoss,
    MultilabelStatScores,
)

_KINDS = (
    *(BinaryCalibrationError, BinaryConfusionMatrix, BinaryFairness, BinaryGroupStatRates),
    *(BinaryHingeLoss, BinaryPrecisionRecallCurve, BinaryStatScores),
    *(MulticlassCalibrationError, MulticlassHingeLoss, MulticlassPrecisionRecallCurve),
    *(MultilabelConfusionMatrix, MultilabelCoverageError, MultilabelPrecisionRecallCurve),
    *(MultilabelRankingAveragePrecision, MultilabelRankingLoss, MultilabelStatScores),
)


def looks_at_all(measure: Metric | MetricCollection) -> bool:
    """Whether what a metric makes of a sample depends on the others of its call."""
    return any(isinstance(part, _KINDS) for part in measure.modules())


@dataclass(slots=True)
class _Call:
    """One of a step's calls of a metric, in all micro-batches.

    Args:
        updates: What takes the arguments.
        given: The arguments, by micro-batch.
    """

    updates: list[Callable[..., Any]]
    given: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=list)


class AtOnce:
    """Calls of metrics that wait for the mini-batch's last micro-batch."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], _Call] = {}  # by the metric's id and a number
        self._counts: dict[tuple[int, int], int] = {}  # by the metric's id and the micro-batch

    def clear(self) -> None:
        """Forget what waits."""
        self._calls.clear()
        self._counts.clear()

    def take(
        self,
        measure: Metric | MetricCollection,
        micro_batch: int,
        updates: list[Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Keep what a micro-batch gives a metric.

        Args:
            measure: The metric.
            micro_batch: Of which this is.
            updates: What takes it with that of the others.
            args: The call's.
            kwargs: The call's.
        """
        place = id(measure), micro_batch
        number = self._counts[place] = self._counts.get(place, 0) + 1
        call = self._calls.setdefault((id(measure), number), _Call(updates))
        call.given.append(tree_map_only(Tensor, _kept, (args, dict(kwargs))))

    def finish(self, measure: Metric | MetricCollection | None = None) -> None:
        """Give metrics what has been kept, each call of a step at once.

        Args:
            measure: The metric; None: all.
        """
        for place in [p for p in self._calls if measure is None or p[0] == id(measure)]:
            call = self._calls.pop(place)
            for args, kwargs in _joined(call.given):
                for update in call.updates:
                    update(*args, **kwargs)


def _kept(tensor: Tensor) -> Tensor:
    """A copy, since the step may change it."""
    return tensor.detach().clone()


def _joined(given: list[Any]) -> list[Any]:
    """The arguments of all micro-batches in one; as they are, if they can't be joined."""
    flat = [tree_flatten(one) for one in given]
    (first, spec), columns = flat[0], [*zip(*(leaves for leaves, _ in flat), strict=False)]
    rows = [i for i, leaf in enumerate(first) if isinstance(leaf, Tensor) and leaf.ndim]
    alike = all(
        other == spec
        and all(isinstance(leaves[i], Tensor) and leaves[i].ndim == first[i].ndim for i in rows)
        and all(leaves[i].shape[1:] == first[i].shape[1:] for i in rows)
        for leaves, other in flat
    )
    if not alike:
        return given
    joined = [torch.cat(column) if i in rows else column[0] for i, column in enumerate(columns)]
    return [tree_unflatten(joined, spec)]
