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

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.engine.batch_statistics import Row, Seen, Statistics, move_all

_AT_ONCE = 16  # rows that are made at once for recomputes


@dataclass(slots=True)
class _Running:
    """A layer in the running micro-batch.

    Args:
        layer: The layer.
        momentum: What it had before.
        buffers: The same, of each of its running ones.
        uses: How often it has run.
        row: What it was pointed at last.
    """

    layer: _NormBase
    momentum: float | None
    buffers: tuple[Tensor | None, ...]
    uses: int = 0
    row: Row | None = None

    def keep(self) -> None:
        """Keep what a layer of the user's has put in the row's place, and not in the row."""
        if self.row is None:
            return
        buffers = self.layer._buffers
        for name, row in zip(_BUFFERS, self.row, strict=False):
            put = buffers.get(name)
            if put is not row and put is not None:
                with torch.no_grad():
                    row.copy_(put)

    def end(self) -> None:
        """Put back what the layer had."""
        self.keep()
        _set_momentum(self.layer, self.momentum)
        self.layer._buffers.update(zip(_BUFFERS, self.buffers, strict=True))


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
        self._nowhere: dict[_NormBase, list[Row]] = {}  # for statistics that nobody wants

    def __deepcopy__(self, memo: Any) -> DeferredBatchNorm:
        """The hook that a copy of a module gets, such as an average: it does nothing."""
        return DeferredBatchNorm([], deferred=False)

    @property
    def trains(self) -> bool:
        """Whether a layer normalises by what it sees: samples then depend on each other."""
        return any(layer.training for layer in self._layers)

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
        self._nowhere.clear()
        self._seen = Seen(len(sizes), shares)
        return Seen(len(sizes), shares)

    @staticmethod
    def _shares_of(across: ObjectChannel, sizes: Sequence[int]) -> list[float]:
        all_sizes = across.gather("sizes", list(sizes))
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
        return _PointedAt(self, None if recompute else self._seen)

    def backward(self, seen: Seen) -> AbstractContextManager[None]:
        """Run one micro-batch's backward inside this context.

        Args:
            seen: What :meth:`begin` has returned.
        """
        if not self._layers or not self._deferred:
            return nullcontext()
        return _PointedAt(self, seen, counts=True)

    def finish(self) -> None:
        """Move the running statistics by those of the mini-batch.

        Call once all its micro-batches are forwarded.
        """
        seen, self._seen = self._seen, Seen()
        if seen.uses:
            self._move(seen)

    def point_at(self, seen: Seen | None) -> None:
        """Let layers leave their statistics there; None: nowhere."""
        self._active, self._into = {}, seen

    def point_back(self) -> None:
        """Let them have what they had."""
        active, self._active = self._active or {}, None
        for running in active.values():
            running.end()

    def count(self, seen: Seen) -> None:
        """Note that a micro-batch's backward is through."""
        seen.through += 1
        if seen.through == seen.micro_batches:
            self._move(seen)
            seen.uses, seen.through = {}, 0  # a kept graph may go through once more

    def _move(self, seen: Seen) -> None:
        move_all(
            [use for of_layer in seen.uses.values() for use in of_layer],
            seen.shares,
            self._together,
        )

    def _before_forward(
        self, layer: _NormBase, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Point a batch-norm layer that is about to run in training at a scratch row."""
        active = self._active
        if active is None or not layer.training:
            return
        if not layer.track_running_stats:  # switched off to freeze the layer, perhaps
            return
        if torch.compiler.is_compiling():
            self._point_uncompiled(active, layer, args, kwargs)
        else:
            self._point(active, layer, args, kwargs)

    def _point(
        self,
        active: dict[_NormBase, _Running],
        layer: _NormBase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        buffers: dict[str, Any] = layer._buffers
        mean, variance = buffers.get("running_mean"), buffers.get("running_var")
        values = args[0] if args else None
        if not isinstance(values, Tensor):
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
            before = mean, variance, buffers.get("num_batches_tracked")
            running = active[layer] = _Running(layer, layer.momentum, before)
        else:
            running.keep()
        if self._into is None:
            unused = self._nowhere.get(layer)
            if not unused:
                unused = self._nowhere[layer] = [*Statistics.of(layer, mean, _AT_ONCE).rows]
            row = unused.pop()
        else:
            row = self._into.row(layer, running.uses, mean, count)
        running.uses += 1
        buffers["running_mean"], buffers["running_var"] = running.row = row
        buffers["num_batches_tracked"] = (
            torch.zeros((), dtype=torch.long, device=mean.device) if synchronized else None
        )
        _set_momentum(layer, 1.0)

    #: The same where a layer is compiled, which would else be compiled once a micro-batch.
    _point_uncompiled = torch.compiler.disable(_point)


class _PointedAt:
    """A context in which layers leave their statistics somewhere; None: nowhere.

    Args:
        batch_norm: Of the layers.
        seen: Where.
        counts: Whether a micro-batch's backward is through at the end.
    """

    __slots__ = "_batch_norm", "_counts", "_seen"

    def __init__(
        self, batch_norm: DeferredBatchNorm, seen: Seen | None, counts: bool = False
    ) -> None:
        self._batch_norm, self._seen, self._counts = batch_norm, seen, counts

    def __enter__(self) -> None:
        self._batch_norm.point_at(self._seen)

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        self._batch_norm.point_back()
        if self._counts and self._seen is not None and error is None:
            self._batch_norm.count(self._seen)


def _set_momentum(layer: _NormBase, momentum: float | None) -> None:
    """Set it, without what modules do to find out what they are given where it is a number."""
    if "momentum" in layer.__dict__:
        layer.__dict__["momentum"] = momentum
    else:
        layer.momentum = momentum
