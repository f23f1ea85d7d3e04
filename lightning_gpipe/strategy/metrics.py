"""Metrics are reduced over replicas alone: the stages of a pipeline see the same values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.strategy import patches


@contextmanager
def over_replicas(groups: Groups) -> Iterator[None]:
    """Let every torchmetrics metric, wherever it is kept, be synchronized over replicas.

    Args:
        groups: The process groups.
    """
    original, replicas = Metric.sync, groups.replicas
    group = groups.siblings.data if replicas > 1 else None

    def sync(
        self: Metric,
        dist_sync_fn: Any = None,
        process_group: dist.ProcessGroup | None = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        should_sync = should_sync and replicas > 1
        original(self, dist_sync_fn, group, should_sync, distributed_available)

    with ExitStack() as undo:
        undo.enter_context(patches.METRIC_SYNC.replaced(sync))
        if replicas == 1:  # Lightning counts processes, and warns that their means differ
            undo.enter_context(patches.EPOCH_WARNING.replaced(lambda: False))
        yield
