"""Batch-norm statistics per mini-batch.

In training every micro-batch is normalised by its own statistics, while the running statistics move
once per mini-batch (GPipe §2.2). It costs no pass over the data: a batch-norm layer that is called
with momentum 1 leaves the statistics of its input in its running buffers, so each micro-batch gets
a scratch row for its own, and the rows are pooled when the mini-batch is through. Classes,
parameters and keys of the modules stay what they are.

SyncBatchNorm normalises a micro-batch together with those of the other replicas, and leaves their
common statistics in the same way. So all replicas must have the same number of micro-batches.

InstanceNorm that tracks running statistics is treated alike; its are averages over the samples.

Layers inside ``torch.utils.checkpoint`` run again in the backward, and their running statistics
move again, as without a pipeline: once per mini-batch, when all its backwards are through.
"""

from __future__ import annotations

from collections import defaultdict
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
    """What one use of a layer sees of a mini-batch: a row per micro-batch.

    Args:
        layer: The layer.
        mean: Rows for all micro-batches.
        variance: The same.
        count: Values per channel of the micro-batches so far.
    """

    layer: _NormBase
    mean: tuple[Tensor, ...]
    variance: tuple[Tensor, ...]
    count: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layer: _NormBase, mean: Tensor, micro_batches: int) -> _Statistics:
        """None so far.

        Args:
            layer: The layer.
            mean: Its running mean.
            micro_batches: M.
        """
        # momentum 1 replaces what is there, but 0 x NaN is NaN: start from zeros
        means, variances = mean.new_zeros(2, micro_batches, len(mean)).unbind()
        return cls(layer, means.unbind(), variances.unbind())

    def next(self, count: float) -> tuple[Tensor, Tensor]:
        """The row of the next micro-batch.

        Args:
            count: Its values per channel.
        """
        m = len(self.count)
        self.count.append(count)
        return self.mean[m], self.variance[m]


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
    uses: dict[_NormBase, list[_Statistics]] = field(default_factory=dict)
    through: int = 0

    def row(
        self, layer: _NormBase, running: _Running, mean: Tensor, count: float
    ) -> tuple[Tensor, ...]:
        """The row for the next use of a layer.

        Args:
            layer: The layer.
            running: It in the running micro-batch.
            mean: Its running mean.
            count: Values per channel.
        """
        uses = self.uses.setdefault(layer, [])
        if running.uses == len(uses):
            uses.append(_Statistics.of(layer, mean, self.micro_batches))
        running.uses += 1
        return uses[running.uses - 1].next(count)


@dataclass(slots=True)
class _Running:
    """A layer in the running micro-batch.

    Args:
        momentum: What it had before.
        buffers: The same.
        uses: How often it has run.
        row: What it was pointed at last.
    """

    momentum: float | None
    buffers: dict[str, Tensor | None]
    uses: int = 0
    row: tuple[Tensor, ...] = ()

    def keep(self, layer: _NormBase) -> None:
        """Keep what a layer of the user's has put in the row's place, and not in the row."""
        for name, row in zip(_BUFFERS, self.row, strict=False):
            put = layer._buffers.get(name)
            if put is not row and put is not None:
                with torch.no_grad():
                    row.copy_(put)


_BUFFERS = "running_mean", "running_var", "num_batches_tracked"


class DeferredBatchNorm:
    """Keeps the running statistics of a stage's batch-norm layers.

    Args:
        modules: The modules of the stage.
        deferred: Whether running statistics move once per mini-batch; otherwise they move with
            every micro-batch. Either way a recompute never moves them.
        across: The object channel over the replicas; None: there is one.
        together: Whether all layers are where this is; else what moves one can't move others.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        deferred: bool,
        across: ObjectChannel | None = None,
        together: bool = True,
    ) -> None:
        self._deferred = deferred
        self._across = across
        self._together = together
        self._layers = [m for m in modules if isinstance(m, _NormBase)]
        self._hooks = [
            layer.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            for layer in self._layers
        ]
        self._active: dict[_NormBase, _Running] | None = None
        self._seen = Seen()  # of the forwards
        self._into: Seen | None = None  # of what runs

    def __deepcopy__(self, memo: Any) -> DeferredBatchNorm:
        """The hook that a copy of a module gets, such as an average: it does nothing."""
        return DeferredBatchNorm([], deferred=False)

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, sizes: Sequence[int]) -> Seen:
        """Begin a mini-batch; collective over the replicas where SyncBatchNorm trains.

        Args:
            sizes: Samples in each micro-batch.

        Returns:
            What :meth:`backward` needs.

        Raises:
            RuntimeError: If replicas have different numbers of micro-batches.
        """
        shares: list[float] = []
        across = self._across
        if across is not None and any(
            isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in self._layers
        ):
            shares = self._shares_of(across, sizes)
        self._seen = Seen(len(sizes), shares)
        return Seen(len(sizes), shares)

    @staticmethod
    def _shares_of(across: ObjectChannel, sizes: Sequence[int]) -> list[float]:
        all_sizes = across.gather(list(sizes))
        counts = [len(found) for found in all_sizes]
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"Replicas have {counts} micro-batches, and SyncBatchNorm needs the same number on"
                " all: leave out small batches with DataLoader(drop_last=True)."
            )
        return [sum(m) / m[across.index] for m in zip(*all_sizes, strict=True)]

    def micro_batch(self, recompute: bool) -> AbstractContextManager[None]:
        """Run one micro-batch's forward through the stage inside this context."""
        if not self._layers or not (self._deferred or recompute):
            return nullcontext()
        return self._pointed_at(None if recompute else self._seen)

    @contextmanager
    def _pointed_at(self, seen: Seen | None) -> Iterator[None]:
        """Let layers leave their statistics there; None: nowhere."""
        self._active = active = dict[_NormBase, _Running]()
        self._into = seen
        try:
            yield
        finally:
            self._active = None
            for layer, running in active.items():
                running.keep(layer)
                _set_momentum(layer, running.momentum)
                layer._buffers.update(running.buffers)

    def finish(self) -> None:
        """Move the running statistics by those of the mini-batch.

        Call once all its micro-batches are forwarded.
        """
        seen, self._seen = self._seen, Seen()
        if seen.uses:
            self._move_all(seen)

    def backward(self, seen: Seen) -> AbstractContextManager[None]:
        """Run one micro-batch's backward inside this context.

        Args:
            seen: What :meth:`begin` has returned.
        """
        return self._backward(seen) if self._layers and self._deferred else nullcontext()

    @contextmanager
    def _backward(self, seen: Seen) -> Iterator[None]:
        with self._pointed_at(seen):
            yield
        seen.through += 1
        if seen.through == seen.micro_batches:
            self._move_all(seen)
            seen.uses, seen.through = {}, 0  # a kept graph may go through once more

    @torch.no_grad()
    def _move_all(self, seen: Seen) -> None:
        uses = [use for of_layer in seen.uses.values() for use in of_layer]
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, use in enumerate(uses):
            if isinstance(use.layer, nn.SyncBatchNorm):  # the statistics are of all replicas
                use.count = [n * s for n, s in zip(use.count, seen.shares, strict=True)]
            over_batch, mean = isinstance(use.layer, _BatchNorm), use.mean[0]
            alone = -1 if self._together else i
            alike[over_batch, len(use.count), mean.device, mean.dtype, alone].append(i)
        moves: dict[int, tuple[Tensor, Tensor]] = {}
        for (over_batch, *_), places in alike.items():
            pooled = _pooled([uses[i] for i in places], over_batch)
            moves.update(zip(places, pooled, strict=True))
        for i, use in enumerate(uses):
            _move(use.layer, *moves[i])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else once a micro-batch
    def _before_forward(
        self, layer: _NormBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Point a batch-norm layer that is about to run in training at a scratch row."""
        active = self._active
        if active is None or not layer.training:
            return
        if not layer.track_running_stats:  # switched off to freeze the layer, perhaps
            return
        buffers: dict[str, Any] = layer._buffers
        mean, variance = buffers.get("running_mean"), buffers.get("running_var")
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
        running = active.get(layer)
        if running is None:
            before = {name: buffers.get(name) for name in _BUFFERS}
            running = active[layer] = _Running(layer.momentum, before)
        running.keep(layer)
        row: tuple[Tensor, ...]
        if self._into is None:
            row = torch.zeros_like(mean), torch.zeros_like(variance)
        else:
            row = self._into.row(layer, running, mean, count)
        buffers["running_mean"], buffers["running_var"] = running.row = row
        buffers["num_batches_tracked"] = (
            torch.zeros((), dtype=torch.long, device=mean.device) if synchronized else None
        )
        _set_momentum(layer, 1.0)


def _set_momentum(layer: _NormBase, momentum: float | None) -> None:
    """Set it, without what modules do to find out what they are given where it is a number."""
    if "momentum" in layer.__dict__:
        layer.__dict__["momentum"] = momentum
    else:
        layer.momentum = momentum


def _pooled(uses: Sequence[_Statistics], over_batch: bool) -> list[tuple[Tensor, Tensor]]:
    """The mean and the unbiased variance of a mini-batch, of each use.

    With n_m values per channel in micro-batch m of mean μ_m and unbiased variance v_m, n = Σ n_m, μ
    = Σ n_m μ_m / n: v = (Σ (n_m - 1) v_m + Σ n_m (μ_m - μ)²) / (n - 1). Every term is positive, so
    v never is negative. InstanceNorm's v is Σ n_m v_m / n, with n samples.

    Args:
        uses: Of layers of one kind, with as many micro-batches each.
        over_batch: Whether they normalise over the samples, unlike InstanceNorm.
    """
    # channels of all uses side by side: a few operations for all of them
    widths, rows = [len(use.mean[0]) for use in uses], range(len(uses[0].count))
    dtype = torch.promote_types(uses[0].mean[0].dtype, torch.float32)
    means = torch.cat([use.mean[m] for m in rows for use in uses])
    variances = torch.cat([use.variance[m] for m in rows for use in uses])
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
