"""Metrics without data, for what a mini-batch gives them, and for stages that have no data."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection


class Blanks:
    """Copies of metrics without data."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}  # by id: the hash of a metric is that of its state
        self._outlines: dict[int, Any] = {}

    def of(self, measure: Any) -> Any:
        """A metric without data, made before a step gives it any: that may have a graph."""
        if id(measure) not in self._copies:
            self._copies[id(measure)] = measure.clone()
            # its class's: one that was put on the metric would reset that one
            type(measure).reset(self._copies[id(measure)])
        return self._copies[id(measure)]

    def keep(self, ids: Container[int]) -> None:
        """Forget all metrics but some: others may get their ids."""
        self._copies = {i: copy for i, copy in self._copies.items() if i in ids}
        self._outlines = {i: outline for i, outline in self._outlines.items() if i in ids}

    def outline_of(self, measure: Any) -> Any:
        """What a metric gives, on the meta device.

        It is a number, or one for each of a collection, where that can't be told without data.
        """
        if id(measure) not in self._outlines:
            self._outlines[id(measure)] = _outline_of(self.of(measure).clone())
        return self._outlines[id(measure)]


def _outline_of(own: Metric | MetricCollection) -> Any:
    for part in own.modules():
        if isinstance(part, Metric):
            part._to_sync, part._update_count = False, 1  # or it would warn that it has no data
    try:
        return tree_map_only(Tensor, lambda t: t.detach().to("meta"), own.compute())
    except Exception:  # as of metrics that keep all samples
        number = torch.empty((), device="meta")
        return dict.fromkeys(own, number) if isinstance(own, MetricCollection) else number
