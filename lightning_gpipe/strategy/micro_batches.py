"""Runs the user's steps once per micro-batch, and tells of them as of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gpipe.engine.kept import KeptInStep
from lightning_gpipe.engine.per_micro_batch import NO_CALL
from lightning_gpipe.engine.running import Outcome
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.model.remote import device_of
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.batches import (
    Places,
    changing_tensor,
    columns_of,
    constant_tensor,
    head,
    rebuilt,
    split_batch,
    tensors_of,
)
from lightning_gpipe.strategy.exchange import Exchange
from lightning_gpipe.strategy.logged import LoggedBefore, StepLog, call_of, warn_of_layer
from lightning_gpipe.strategy.logged_kept import BY_STEPS, LoggedKept
from lightning_gpipe.strategy.merging import Argument, merge, weighted_mean
from lightning_gpipe.strategy.recipes import means_of
from lightning_gpipe.strategy.step_attributes import StepAttributes
from lightning_gpipe.strategy.step_buffers import StepBuffers
from lightning_gpipe.strategy.step_metrics import StepMetrics


@dataclass(slots=True)
class _MiniBatch:
    """The steps of a mini-batch.

    Args:
        step: Runs the user's step.
        parts: What it is given for each micro-batch.
        sizes: Samples in each.
        rest: Its other arguments.
        metrics: The module's metrics.
        trains: Whether it returns a loss to train by.
        buffers: Looks for buffers that it changes; None: nobody looks.
        attributes: Looks for attributes that it changes; None: nobody looks.
        exchange: Looks for what it computes of samples together; None: nobody looks.
        log: What it logs.
        results: What it returns, without graphs.
    """

    step: Callable[..., Any]
    parts: Sequence[Any]
    sizes: Sequence[int]
    rest: tuple[Any, ...]
    metrics: StepMetrics
    trains: bool
    buffers: StepBuffers | None = None
    attributes: StepAttributes | None = None
    exchange: Exchange | None = None
    log: StepLog = field(init=False)
    results: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = StepLog(self.metrics.values, self.metrics.logged)
        self.rest = tuple(Argument(one) if type(one) is int else one for one in self.rest)

    def given(self) -> list[list[Tensor]]:
        """The tensors in each micro-batch."""
        return list(map(tensors_of, self.parts))

    def run(self, m: int) -> Outcome:
        """Run the step of a micro-batch."""
        exchange = self.exchange if m == 0 else None
        self.log.begin(m, exchange is not None)
        self.metrics.values.samples = self.sizes[m]
        if exchange is not None:
            exchange.begin(self._rows(), self.sizes[m], self.parts[0])
        self.metrics.follow(None if exchange is None else exchange.follow)
        if not m and self.buffers is not None:
            self.buffers.begin()
        with nullcontext() if self.attributes is None else self.attributes.followed(m):
            try:
                result = self.step(self.parts[m], *self.rest)
            except (RuntimeError, ValueError, LookupError) as error:
                self._explain(error, m)
                raise
        self.log.end(_loss_of(result) if self.trains else None)
        result = _with_scalar(result) if self.trains else result
        loss, look = _loss_of(result), None
        self.results.append(_detached(result))
        if m == len(self.parts) - 1:
            if self.buffers is not None:
                self.buffers.end()
            self.metrics.finish(self.sizes, list(map(_weight_of, self.results, self.sizes)))
        weight = result.get("weight") if isinstance(result, Mapping) and loss is not None else None
        if exchange is not None:
            means = self.log.means() + ([] if self.trains else self._means(result))
            exchange.end(loss if self.trains else None, weight, means)
            look = exchange.look
        return Outcome(loss, weight, look)

    def _explain(self, error: Exception, m: int) -> None:
        """Add to a step's error what splitting by samples may have to do with it."""
        size, samples = self.sizes[m], sum(self.sizes)
        other = tensors_of(self.parts[m - 1]) if len(self.sizes) > 1 else []
        for tensor, its in zip(tensors_of(self.parts[m]), other, strict=False):
            shape = tuple(tensor.shape)
            if shape[:1] == (size,) and samples in shape[1:]:
                what = (
                    f"a tensor of the batch came with the shape {shape}, as {size} of its"
                    f" {samples} rows. If it relates all samples to each other, as the adjacency of"
                    " a graph does, they can't be split: use GPipeStrategy(step='mini-batch') or"
                    " chunks=1."
                )
            elif tensor is its and shape and shape[0] > 1:
                what = (
                    f"a tensor of the batch came whole, with the shape {shape}, since it hasn't a"
                    f" row for each of the {samples} samples. If it has theirs one after another,"
                    " as the targets of a CTC loss may, pad them to [batch, ...], or use"
                    " GPipeStrategy(step='mini-batch')."
                )
            elif size == 1 < samples and shape[:1] == (1,):
                what = (
                    "this micro-batch has one sample, so that squeeze() without a dimension takes"
                    " the batch's away, too: give it the dimension, or use fewer chunks."
                )
                if "per channel" in str(error):  # batch norm's
                    what = "this micro-batch has one sample: use fewer chunks, or larger batches."
            else:
                continue
            add_note(error, f"With step='micro-batch' {what}")
            return

    def _rows(self) -> list[Tensor]:
        """The tensors in the first micro-batch that have a row for each sample."""
        pairs = zip(tensors_of(self.parts[0]), tensors_of(self.parts[1]), strict=False)
        return [t for t, other in pairs if t is not other and t.ndim and len(t) == self.sizes[0]]

    def _means(self, result: Any) -> list[tuple[str, Tensor]]:
        """What the step has returned that should be means over samples, or rows of them."""
        values, recipe_of = {"": result}, self.metrics.values.recipe_of
        named = dict(enumerate(result)) if isinstance(result, (list, tuple)) else result
        if isinstance(named, Mapping):
            values = {f" as {name!r}": value for name, value in named.items()}
        return [
            (f"What the step returned{name}", mean)
            for name, value in values.items()
            if isinstance(value, Tensor)
            for mean in means_of(value, recipe_of(value))
        ]


class MicroBatchSteps:
    """Runs a Trainer's steps once per micro-batch.

    Args:
        trainer: The Trainer.
        pipeline: Its module as a pipeline.
    """

    def __init__(self, trainer: pl.Trainer, pipeline: PipelinedModule) -> None:
        self._trainer, self._pipeline = trainer, pipeline
        self._log: StepLog | None = None
        self._evaluations = 0
        self._first: list[Tensor] | None = None  # of the first batch
        self._places = defaultdict[tuple[Any, ...], Places](Places)
        self._fixed = defaultdict[tuple[Any, ...], dict[str, int]](dict)  # lists, see merge
        self._exchange = Exchange(pipeline.groups)
        self._buffers = StepBuffers(trainer.lightning_module, pipeline.backbone)
        self._attributes = StepAttributes(trainer.lightning_module, pipeline.backbone)
        self.metrics = StepMetrics(trainer.lightning_module, pipeline)
        self._left = KeptInStep([*trainer.lightning_module.modules()], None)
        self._logged_left = LoggedKept(self._left.has, BY_STEPS)
        self._has_told = False  # of layers that log

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """What ``self.log`` does: in a step it is noted, and done once for the mini-batch."""
        if self._log is None:
            self._logged_left.look(*call_of(*args, **kwargs)[:2])
            original(*args, **kwargs)
        else:
            trace = self._pipeline.step_trace
            is_layer = trace is None and self._pipeline.is_stepping
            if is_layer and self._pipeline.groups.stages > 1 and not self._has_told:
                self._has_told = True
                warn_of_layer()
            self._log.note(trace, *args, **kwargs)

    def train(
        self, step: Callable[..., Any], number: int, synchronize: bool, batch: Any, *rest: Any
    ) -> Any:
        """Run training steps with their backwards. Collective over the pipeline.

        Args:
            step: Runs the user's step.
            number: Counts the batches.
            synchronize: Whether the optimizer steps after it.
            batch: The mini-batch.
            rest: The step's other arguments.

        Returns:
            What the step would have returned for the mini-batch, without a graph.
        """
        if _lightning.skips_backward(self._trainer):
            with torch.no_grad():
                return self.evaluate(step, "training without backward", batch, *rest)
        if self._probe(step, batch, *rest) is not NotImplemented:
            raise RuntimeError(NO_CALL)
        self.metrics.begin(is_first=not rest or rest[0] == 0)
        parts, sizes = split_batch(batch, self._pipeline.chunks, self._places[("training",)])
        self._look_for_constants(columns_of(batch))
        steps = _MiniBatch(step, parts, sizes, rest, self.metrics, trains=True)
        if len(parts) > 1:
            steps.buffers = self._buffers
            if sizes[0] == sizes[1]:  # else what is kept for a size may be another one
                steps.attributes = self._attributes
            steps.exchange = self._exchange if self._exchange.is_due("training") else None
        scale = self._scale() / self._trainer.accumulate_grad_batches
        self._left.begin_step("training", len(parts))
        self._log = steps.log
        try:
            with self._left.running(columns_of(batch)):
                weighting = self._pipeline.train_steps(
                    (0, number), sizes, steps.given(), steps.run, scale, synchronize
                )
        finally:
            self._log = None
            self._exchange.forget()
        result = self._told(steps, weighting.weights, self._fixed[("training",)])
        if steps.exchange is not None:
            steps.exchange.look_at(list(map(_loss_of, steps.results)))
        if synchronize:
            loss = result["loss"] if isinstance(result, Mapping) else result
            self._pipeline.check(loss)
        return result

    def evaluate(self, step: Callable[..., Any], kind: str, batch: Any, *rest: Any) -> Any:
        """Run steps of validation, test or prediction. Collective over the pipeline."""
        result = self._probe(step, batch, *rest)
        if result is not NotImplemented:
            return result
        self._evaluations += 1
        self.metrics.begin(is_first=not rest or rest[0] == 0)
        loader = kind, *rest[1:]
        parts, sizes = split_batch(batch, self._pipeline.chunks, self._places[loader])
        steps = _MiniBatch(step, parts, sizes, rest, self.metrics, trains=False)
        if len(parts) > 1 and self._exchange.is_due(kind):
            steps.exchange = self._exchange
        self._left.begin_step(kind, len(parts))
        self._log = steps.log
        try:
            with self._left.running(columns_of(batch)):
                weighting = self._pipeline.run_steps(
                    kind, (1, self._evaluations), sizes, steps.given(), steps.run
                )
        finally:
            self._log = None
            self._exchange.forget()
        return self._told(steps, weighting.weights, self._fixed[loader])

    def _look_for_constants(self, tensors: list[Tensor]) -> None:
        """Warn, in the second batch, of tensors that may be split, or not, by mistake."""
        if self._first is None:
            self._first = [head(t.detach()).clone() for t in tensors]
        elif self._first:
            first, self._first = self._first, []
            samples = next((len(t) for t in tensors if t.ndim), 0)
            if self._pipeline.chunks == 1:
                return
            found = changing_tensor(first, tensors, samples)
            if found is not None:
                rank_zero_warn(
                    f"A tensor of shape {tuple(found.shape)} is another one in each batch, and"
                    f" hasn't a row for each of its {samples} samples. So with step='micro-batch'"
                    " every micro-batch gets it whole, which is right for positions. If its rows"
                    " are samples, as those of a second loader, a mean over both parts and all"
                    " counts come out otherwise; if it numbers the batch's rows, as the edges of a"
                    " graph do, a micro-batch hasn't all of those. Let all parts have a row for"
                    " each sample, or use GPipeStrategy(step='mini-batch')."
                )
            found = constant_tensor(first, tensors, samples)
            if found is not None:
                rank_zero_warn(
                    f"A tensor of shape {tuple(found.shape)} is the same in the first two batches,"
                    " and as long as they are, so step='micro-batch' splits it by samples. If it"
                    " isn't one row per sample, make it a buffer of the module, or let the loader"
                    " give it the shape [1, ...]."
                )

    def _probe(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Have the module cut, if that waits for an input; see :meth:`PipelinedModule.probe`."""
        log = StepLog(self.metrics.values, LoggedBefore())
        self._log = log
        try:
            result = self._pipeline.probe(lambda: step(batch, *rest), (batch, rest))
        finally:
            self._log = None
        if result is not NotImplemented:
            log.replay(self._trainer.lightning_module.log, [1.0], [1])
        return result

    def _told(self, steps: _MiniBatch, weights: Sequence[float], fixed: dict[str, int]) -> Any:
        """Log what the steps have logged, and merge what they have returned."""
        values, sizes, what = self.metrics.values, steps.sizes, "What the step returned"

        def known(results: Sequence[Tensor], name: str) -> Tensor | None:
            recipes = list(map(values.recipe_of, results))
            adds = not results[0].is_floating_point()
            return values.of_mini_batch(recipes, weights, name, adds)

        with torch.no_grad():
            steps.log.replay(self._trainer.lightning_module.log, weights, sizes)
            results = steps.results
            if isinstance(results[0], Mapping) and "loss" in results[0]:
                own: dict[str, Any] = {}
                if steps.trains:  # what it is trained by
                    own["loss"] = weighted_mean([result["loss"] for result in results], weights)
                if "weight" in results[0]:
                    own["weight"] = _like(results[0]["weight"], sum(weights))
                others = [
                    {key: value for key, value in result.items() if key not in own}
                    for result in results
                ]
                return {**own, **merge(others, sizes, weights, what, known, fixed)}
            if steps.trains and isinstance(results[0], Tensor):
                return weighted_mean(results, weights)
            return merge(results, sizes, weights, what, known, fixed)

    def _scale(self) -> float:
        """What the precision plugin multiplies losses by."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is None:
            return 1.0
        one = torch.ones((), device=self._trainer.strategy.root_device)
        return float(scaler.scale(one))


def _weight_of(result: Any, size: int) -> Any:
    """How much a micro-batch counts."""
    return result.get("weight", size) if isinstance(result, Mapping) else size


def _like(given: Any, total: float) -> Any:
    """A sum of weights as steps return them: a tensor, or a number."""
    if isinstance(given, Tensor):
        return torch.full(given.shape, total, dtype=given.dtype, device=device_of(given))
    return int(total) if isinstance(given, int) else total


def _loss_of(result: Any) -> Tensor | None:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) else None


def _with_scalar(result: Any) -> Any:
    """What a training step returns, with a loss that has no dimensions.

    Raises:
        MisconfigurationException: Lightning's, if it is nothing to train by.
        RuntimeError: If the loss is no scalar, or there is none.
    """
    loss = _loss_of(result)
    if loss is None:
        ClosureResult.from_training_step_output(result)
        raise RuntimeError(
            "The training step returned no loss, and with step='micro-batch' no micro-batch can be"
            ' skipped: return {"loss": loss, "weight": 0} for one that shall not count.'
        )
    if not loss.ndim:
        return result
    if loss.numel() != 1:
        raise RuntimeError(
            f"The loss has the shape {tuple(loss.shape)}, and only a scalar can be trained by:"
            " return loss.mean()."
        )
    loss = loss.reshape(())
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss


def _detached(value: Any) -> Any:
    """What a step has returned without graphs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return rebuilt(value, list(map(_detached, value)))
    if isinstance(value, Mapping):
        return rebuilt(value, {key: _detached(item) for key, item in value.items()})
    return value
