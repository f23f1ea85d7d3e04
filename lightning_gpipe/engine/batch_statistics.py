"""What batch-norm layers see of a mini-batch, and how their running statistics move by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

#: Of a micro-batch, its mean and its variance.
Row: TypeAlias = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Statistics:
    """What one use of a layer sees of a mini-batch: a row per micro-batch.

    Args:
        layer: The layer.
        rows: Mean and variance of each micro-batch.
        count: Values per channel of the micro-batches so far.
    """

    layer: _NormBase
    rows: tuple[Row, ...]
    count: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layer: _NormBase, mean: Tensor, micro_batches: int) -> Statistics:
        """None so far.

        Args:
            layer: The layer.
            mean: Its running mean.
            micro_batches: M.
        """
        # momentum 1 replaces what is there, but 0 x NaN is NaN: start from zeros
        means, variances = mean.new_zeros(2, micro_batches, len(mean)).unbind()
        rows = zip(means.unbind(), variances.unbind(), strict=True)
        # a layer may change its row by itself, which must not count as a change of the others
        return cls(layer, tuple((mean.data, variance.data) for mean, variance in rows))


@dataclass(slots=True)
class Seen:
    """What layers see of a mini-batch, in its forwards or in its backwards.

    Args:
        micro_batches: M.
        shares: Of each micro-batch, over how many times its samples SyncBatchNorm's statistics are.
        uses: Of each layer, in order.
        through: How many micro-batches are.
    """

    micro_batches: int = 0
    shares: Sequence[float] = ()
    uses: dict[_NormBase, list[Statistics]] = field(default_factory=dict)
    through: int = 0

    def row(self, layer: _NormBase, number: int, mean: Tensor, count: float) -> Row:
        """The row for the next micro-batch.

        Args:
            layer: A layer.
            number: How often it has run in this micro-batch.
            mean: Its running mean.
            count: Values per channel.
        """
        uses = self.uses.get(layer)
        if uses is None:
            uses = self.uses[layer] = []
        if number == len(uses):
            uses.append(Statistics.of(layer, mean, self.micro_batches))
        use = uses[number]
        use.count.append(count)
        return use.rows[len(use.count) - 1]


@torch.no_grad()
def move_all(uses: Sequence[Statistics], shares: Sequence[float], together: bool) -> None:
    """Fold the statistics of a mini-batch into the layers' running ones.

    Args:
        uses: All uses of layers.
        shares: See :class:`Seen`.
        together: Whether all layers are where this is; else what moves one can't move others.
    """
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, use in enumerate(uses):
        if isinstance(use.layer, nn.SyncBatchNorm):  # the statistics are of all replicas
            use.count = [n * s for n, s in zip(use.count, shares, strict=True)]
        over_batch, (mean, _) = isinstance(use.layer, _BatchNorm), use.rows[0]
        alone = -1 if together else i
        alike[over_batch, len(use.count), mean.device, mean.dtype, alone].append(i)
    moves: dict[int, tuple[Tensor, Tensor]] = {}
    for (over_batch, *_), places in alike.items():
        pooled = _pooled([uses[i] for i in places], over_batch)
        moves.update(zip(places, pooled, strict=True))
    for i, use in enumerate(uses):
        _move(use.layer, *moves[i])


def _pooled(uses: Sequence[Statistics], over_batch: bool) -> list[tuple[Tensor, Tensor]]:
    """The mean and the unbiased variance of a mini-batch, of each use.

    With n_m values per channel in micro-batch m of mean μ_m and unbiased variance v_m, n = Σ n_m, μ
    = Σ n_m μ_m / n: v = (Σ (n_m - 1) v_m + Σ n_m (μ_m - μ)²) / (n - 1). Every term is positive, so
    v never is negative. InstanceNorm's v is Σ n_m v_m / n, with n samples.

    Args:
        uses: Of layers of one kind, with as many micro-batches each.
        over_batch: Whether they normalise over the samples, unlike InstanceNorm.
    """
    # channels of all uses side by side: a few operations for all of them
    widths, rows = [len(use.rows[0][0]) for use in uses], range(len(uses[0].count))
    dtype = torch.promote_types(uses[0].rows[0][0].dtype, torch.float32)
    means = torch.cat([use.rows[m][0] for m in rows for use in uses])
    variances = torch.cat([use.rows[m][1] for m in rows for use in uses])
    means, variances = (found.view(len(rows), -1).to(dtype) for found in (means, variances))
    counts = torch.tensor([[use.count[m] for use in uses] for m in rows], dtype=dtype, device="cpu")
    count = counts.repeat_interleave(torch.tensor(widths, device="cpu"), 1)
    count = count.to(means.device, non_blocking=True)
    total = _sum(count)
    if not over_batch:
        mean, variance = _sum(count * means) / total, _sum(count * variances) / total
    else:
        shift = means - means[0]  # small next to a large mean: no digits are lost
        pooled_shift = _sum(count * shift) / total
        spread = (count - 1) * variances + count * (shift - pooled_shift).square()
        mean, variance = means[0] + pooled_shift, _sum(spread) / (total - 1)
    return list(zip(mean.split(widths), variance.split(widths), strict=True))


def _sum(rows: Tensor) -> Tensor:
    """The sum of rows, in order: ``Tensor.sum`` takes another order for some of the columns.

    Which of them depends on their number, so on the layers that are on a stage.
    """
    first, *others = rows.unbind()
    total = first.clone()
    for row in others:
        total += row
    return total


def _move(layer: _NormBase, mean: Tensor, variance: Tensor) -> None:
    """Fold the statistics of a mini-batch into a layer's running ones."""
    running_mean, running_variance = layer.running_mean, layer.running_var
    if running_mean is None or running_variance is None:
        return
    tracked, momentum = layer.num_batches_tracked, layer.momentum
    over_batch = isinstance(layer, _BatchNorm)
    if tracked is not None and over_batch:
        tracked.add_(1)
    share: Tensor | float = 0.0 if momentum is None else momentum
    if momentum is None and over_batch:  # cumulative average; InstanceNorm knows none
        share = 1.0 if tracked is None else tracked.to(mean.dtype).reciprocal()
    _move_by(running_mean, mean, share)
    _move_by(running_variance, variance, share)


def _move_by(running: Tensor, seen: Tensor, share: Tensor | float) -> None:
    """Fold a statistic into a running one. A share on the device stays there: no host waits."""
    if isinstance(share, Tensor):
        running.mul_(1 - share).add_(seen * share)
    else:
        running.mul_(1 - share).add_(seen, alpha=share)
