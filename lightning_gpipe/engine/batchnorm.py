"""Batch-norm statistics per mini-batch.

In training every micro-batch is normalised by its own statistics, while the running statistics move
once per mini-batch (GPipe §2.2). It costs no pass over the data: a batch-norm layer that is called
with momentum 1 leaves the statistics of its input in its running buffers, so each micro-batch gets
a scratch row for its own, and the rows are pooled when the mini-batch is through. Classes,
parameters and keys of the modules stay what they are.

SyncBatchNorm normalises a micro-batch together with those of the other replicas, and leaves their
common statistics in the same way. So all replicas must have the same number of micro-batches.

InstanceNorm that tracks running statistics is treated alike; its are averages over the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_gpipe.comm.messages import ObjectChannel


@dataclass(slots=True)
class _Statistics:
    """What one use of a layer saw of a mini-batch: a row per micro-batch."""

    mean: list[Tensor] = field(default_factory=list)
    variance: list[Tensor] = field(default_factory=list)
    count: list[float] = field(default_factory=list)


class DeferredBatchNorm:
    """Keeps the running statistics of a stage's batch-norm layers.

    Args:
        modules: The modules of the stage.
        deferred: Whether running statistics move once per mini-batch; otherwise they move with
            every micro-batch. Either way a recompute never moves them.
        across: The object channel over the replicas; None: there is one.
    """

    def __init__(
        self, modules: Iterable[nn.Module], deferred: bool, across: ObjectChannel | None = None
    ) -> None:
        self._deferred = deferred
        self._across = across
        self._shares: list[float] = []
        self._layers = [m for m in modules if isinstance(m, _NormBase)]
        self._hooks = [
            layer.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            for layer in self._layers
        ]
        self._active: dict[nn.Module, int] | None = (
            None  # uses of each layer in the running micro-batch
        )
        self._recompute = False
        self._seen: dict[_NormBase, list[_Statistics]] = {}

    def __deepcopy__(self, memo: Any) -> DeferredBatchNorm:
        """The hook that a copy of a module gets, such as an average: it does nothing."""
        return DeferredBatchNorm([], deferred=False)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a mini-batch; collective over the replicas where SyncBatchNorm trains.

        Args:
            sizes: Samples in each micro-batch.

        Raises:
            RuntimeError: If replicas have different numbers of micro-batches.
        """
        self._shares, self._seen = [], {}
        across = self._across
        if across is None or not any(
            isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in self._layers
        ):
            return
        all_sizes = across.gather(list(sizes))
        counts = [len(found) for found in all_sizes]
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"Replicas have {counts} micro-batches, and SyncBatchNorm needs the same number on"
                " all: leave out small batches with DataLoader(drop_last=True)."
            )
        self._shares = [sum(m) / m[across.index] for m in zip(*all_sizes, strict=True)]

    def micro_batch(self, recompute: bool) -> AbstractContextManager[None]:
        """Run one micro-batch's forward through the stage inside this context."""
        if not self._layers or not (self._deferred or recompute):
            return nullcontext()
        return self._micro_batch(recompute)

    @contextmanager
    def _micro_batch(self, recompute: bool) -> Iterator[None]:
        self._active, self._recompute = {}, recompute
        kept = [(layer, layer.momentum, dict(layer._buffers)) for layer in self._layers]
        try:
            yield
        finally:
            self._active = None
            for layer, momentum, buffers in kept:
                layer.momentum = momentum
                layer._buffers.update(buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Move the running statistics by those of the mini-batch.

        Call once all its micro-batches are forwarded.
        """
        seen, self._seen = self._seen, {}
        for layer, uses in seen.items():
            for use in uses:
                if isinstance(layer, nn.SyncBatchNorm):  # the statistics are of all replicas
                    use.count = [n * s for n, s in zip(use.count, self._shares, strict=True)]
                self._move(layer, use)

    def _before_forward(
        self, layer: _NormBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Point a batch-norm layer that is about to run in training at a scratch row."""
        if self._active is None or not layer.training:
            return
        if not layer.track_running_stats:  # switched off to freeze the layer, perhaps
            return
        mean, variance = layer.running_mean, layer.running_var
        values = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if mean is None or variance is None or values is None:
            return
        over_batch = isinstance(layer, _BatchNorm)
        count = values.numel() // max(values.shape[1], 1) if over_batch else len(values)
        synchronized = isinstance(layer, nn.SyncBatchNorm)
        if count == 1 and over_batch and not synchronized:
            raise ValueError(
                "A batch-norm layer got a micro-batch with one value per channel, which has no"
                " variance: lower `chunks`, so that every micro-batch has at least two samples. For"
                " a small last batch use DataLoader(drop_last=True)."
            )
        # momentum 1 replaces what is there, but 0 x NaN is NaN: start from zeros
        row = torch.zeros_like(mean), torch.zeros_like(variance)
        if not self._recompute:
            use = self._active.get(layer, 0)
            self._active[layer] = use + 1
            uses = self._seen.setdefault(layer, [])
            if use == len(uses):
                uses.append(_Statistics())
            uses[use].mean.append(row[0])
            uses[use].variance.append(row[1])
            uses[use].count.append(count)
        tracked = torch.zeros((), dtype=torch.long, device=mean.device) if synchronized else None
        layer._buffers.update(running_mean=row[0], running_var=row[1], num_batches_tracked=tracked)
        layer.momentum = 1.0

    @staticmethod
    def _move(layer: _NormBase, use: _Statistics) -> None:
        """Fold the pooled mean and unbiased variance of a mini-batch into the running ones.

        With n_m values per channel in micro-batch m of mean μ_m and unbiased variance v_m, n = Σ
        n_m, μ = Σ n_m μ_m / n: v = (Σ (n_m - 1) v_m + Σ n_m (μ_m - μ)²) / (n - 1). Every term is
        positive, so v never is negative. InstanceNorm's v is Σ n_m v_m / n, with n samples.
        """
        mean, variance, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if mean is None or variance is None:
            return
        over_batch = isinstance(layer, _BatchNorm)
        if tracked is not None and over_batch:
            tracked.add_(1)
        momentum = layer.momentum
        dtype = torch.promote_types(mean.dtype, torch.float32)
        share: Tensor | float = 0.0 if momentum is None else momentum
        if momentum is None and over_batch:  # cumulative average; InstanceNorm knows none
            share = 1.0 if tracked is None else tracked.to(dtype).reciprocal()
        means, variances = torch.stack(use.mean).to(dtype), torch.stack(use.variance).to(dtype)
        count = means.new_tensor(use.count).unsqueeze(1)
        total = sum(use.count)
        if not over_batch:
            _move_by(mean, (count * means).sum(0) / total, share)
            _move_by(variance, (count * variances).sum(0) / total, share)
            return
        shift = means - means[0]  # small next to a large mean: no digits are lost
        pooled_shift = (count * shift).sum(0) / total
        pooled = ((count - 1) * variances).sum(0) + (count * (shift - pooled_shift).square()).sum(0)
        _move_by(mean, means[0] + pooled_shift, share)
        _move_by(variance, pooled / (total - 1), share)


def _move_by(running: Tensor, seen: Tensor, share: Tensor | float) -> None:
    """Fold a statistic into a running one. A share on the device stays there: no host waits."""
    if isinstance(share, Tensor):
        running.mul_(1 - share).add_(seen * share)
    else:
        running.mul_(1 - share).add_(seen, alpha=share)
