"""Metrics of torchmetrics that look at all that a call of them gives.

Those of classification take scores for logits if any of a call is less than 0 or more than 1. In
a small micro-batch perhaps none is, so these metrics get the mini-batch's scores in one call.
Others that take something from a call as a whole are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
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
from torchmetrics.image import (
    MultiScaleStructuralSimilarityIndexMeasure,
    StructuralSimilarityIndexMeasure,
)
from torchmetrics.wrappers import MinMaxMetric, Running

Measure: TypeAlias = Metric | MetricCollection
_MANY = 1 << 12  # scores of a micro-batch, of which some are out of 0 to 1 if they are logits
_WITH_RANGE = StructuralSimilarityIndexMeasure, MultiScaleStructuralSimilarityIndexMeasure
_KINDS = (
    *(BinaryCalibrationError, BinaryConfusionMatrix, BinaryFairness, BinaryGroupStatRates),
    *(BinaryHingeLoss, BinaryPrecisionRecallCurve, BinaryStatScores),
    *(MulticlassCalibrationError, MulticlassHingeLoss, MulticlassPrecisionRecallCurve),
    *(MultilabelConfusionMatrix, MultilabelCoverageError, MultilabelPrecisionRecallCurve),
    *(MultilabelRankingAveragePrecision, MultilabelRankingLoss, MultilabelStatScores),
)


def looks_at_all(measure: Measure, given: Any) -> bool:
    """Whether what a metric makes of a sample may depend on the others of its call.

    Args:
        measure: The metric.
        given: The call's arguments. Of many logits some are out of 0 to 1 anyway, so that large
            ones, such as of images' pixels, needn't be kept.
    """
    scores = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.is_floating_point()]
    if not scores or max(t.numel() for t in scores) > _MANY:
        return False
    return any(isinstance(part, _KINDS) for part in measure.modules())


def refuse(measure: Measure, chunks: int) -> None:
    """Refuse a metric that takes something from a call as a whole, which is one of several.

    Raises:
        ValueError: With what to do.
    """
    for part in measure.modules():
        if isinstance(part, Running):
            raise ValueError(
                "torchmetrics' Running counts updates, and with step='micro-batch' a mini-batch is"
                " several: use GPipeStrategy(step='mini-batch')."
            )
        if isinstance(part, _WITH_RANGE) and part.data_range is None and chunks > 1:
            raise ValueError(
                f"{type(part).__name__} takes the range of the images from each of its calls, and"
                " with step='micro-batch' a mini-batch is several: give it data_range=..., such as"
                " 1.0, or use GPipeStrategy(step='mini-batch')."
            )


def refuse_call(measure: Measure) -> None:
    """Refuse a metric that takes something from what each call of it gives.

    Raises:
        ValueError: With what to do.
    """
    if any(isinstance(part, MinMaxMetric) for part in measure.modules()):
        raise ValueError(
            "torchmetrics' MinMaxMetric takes the extremes of what each call of it gives, and"
            " with step='micro-batch' a mini-batch is several: call its update in the step, and"
            " log its compute() in on_train_epoch_end, or use GPipeStrategy(step='mini-batch')."
        )


@dataclass(slots=True)
class _Call:
    """One of a step's calls of a metric, in all micro-batches.

    Args:
        measure: The metric.
        updates: What takes the arguments.
        given: The arguments, by micro-batch.
    """

    measure: Measure
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
        measure: Measure,
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
        call = self._calls.setdefault((id(measure), number), _Call(measure, updates))
        call.given.append(tree_map_only(Tensor, _kept, (args, dict(kwargs))))

    def finish(self, measure: Measure | None = None) -> None:
        """Give metrics what has been kept, each call of a step at once.

        Args:
            measure: The metric, or one of a collection; None: all.
        """
        for place, call in [*self._calls.items()]:
            if measure is not None and all(part is not measure for part in call.measure.modules()):
                continue
            del self._calls[place]
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
