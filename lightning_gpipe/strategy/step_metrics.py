"""Metrics of torchmetrics in steps that run once per micro-batch.

A metric's update reads values, so it runs as one function, on the stages that have its arguments.
The others take over its state before it is computed. What a metric gives for one step, which is
logged with ``on_step=True``, is that of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities import prints

from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.redirect import Redirect
from lightning_gpipe.model.remote import Where, tensors_in
from lightning_gpipe.model.step_trace import Follow, StepTrace
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy.aggregates import Aggregates, aggregated
from lightning_gpipe.strategy.at_once import AtOnce, Measure, looks_at_all, refuse, refuse_call
from lightning_gpipe.strategy.blank_metrics import Blanks
from lightning_gpipe.strategy.logged import LoggedBefore
from lightning_gpipe.strategy.metric_states import MetricStates
from lightning_gpipe.strategy.recipes import Call
from lightning_gpipe.strategy.step_values import StepValues
from lightning_gpipe.tensors.default_type import default_dtype

_FORWARD, _UPDATE, _COMPUTE = "forward", "update", "compute"
_SHARE_STATES = "_compute_groups_create_state_ref"  # between the metrics of a collection


class StepMetrics:
    """The metrics of a module, while its steps run once per micro-batch.

    Args:
        module: The user's module.
        pipeline: The same as a pipeline.
    """

    def __init__(self, module: nn.Module, pipeline: PipelinedModule) -> None:
        self._module, self._pipeline = module, pipeline
        self._measures: list[Measure] = []
        self._trackers: list[MetricTracker] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        # by id: the hash of a metric is that of its state
        self._sources: dict[int, int] = {}  # the stage that has the state
        self._states = MetricStates()
        self._of_mini_batch: dict[Call, Measure] = {}
        self._forwarded: dict[Call, tuple[Measure, Where | None]] = {}
        self._calls: dict[tuple[int, int], int] = {}  # of which, and in which micro-batch
        self._blanks = Blanks()
        self._default_dtype = torch.get_default_dtype()
        #: What the steps of the mini-batch make of what they give, and of means; how they log it.
        self.values, self.logged = StepValues(), LoggedBefore()
        self._aggregates, self._at_once = Aggregates(self.values), AtOnce()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the metrics' calls come here inside this context."""
        try:
            self._attach(_outermost(self._module))
            yield
        finally:
            for measure, name, before in reversed(self._replaced):
                if before is None:
                    measure.__dict__.pop(name, None)
                else:
                    measure.__dict__[name] = before
            self._replaced.clear()
            self._measures.clear()

    def begin(self, is_first: bool) -> None:
        """Begin a mini-batch: trackers may have made new metrics.

        Args:
            is_first: Whether an epoch begins with it: then hooks may have made some, too.
        """
        for each in (self._aggregates, self._at_once, self.values, self._calls):
            each.clear()
        known = {id(measure) for measure in self._measures}
        if is_first:
            self._trackers = [m for m in self._module.modules() if isinstance(m, MetricTracker)]
            found = {id(measure): measure for measure in _outermost(self._module)}
            self._measures = [m for m in self._measures if id(m) in found]  # others were replaced
            left = {id(part) for measure in self._measures for part in _parts(measure)}
            self._of_mini_batch = {c: own for c, own in self._of_mini_batch.items() if c[0] in left}
            self._blanks.keep(left)
            self._states.forget(left)
            self._attach(m for i, m in found.items() if i not in known)
        else:
            for tracker in self._trackers:
                self._attach(m for m in _outermost(tracker) if id(m) not in known)

    def follow(self, also: Follow | None = None) -> None:
        """Follow the step of a micro-batch, as another does. In the step."""
        if (trace := self._pipeline.step_trace) is not None:
            own = self.values.follow
            trace.follow = own if also is None else partial(_both, own, also)

    def finish(self, sizes: Sequence[int], weights: Sequence[Any]) -> None:
        """End the last step of a mini-batch: note what it gives. In the step.

        Args:
            sizes: Samples in each micro-batch.
            weights: How much each of them counts.
        """
        trace, forwarded = self._pipeline.step_trace, self._forwarded
        self._forwarded = {}
        if trace is None:
            return
        trace.follow = None
        self.values.decisions.end(len(sizes), sizes[-1])
        with trace.suspended():
            self._at_once.finish()
        for aggregate, where in self._aggregates.finish(trace, sizes, weights):
            for metric in _members(aggregate).values():
                metric._forward_cache = self._arrived(trace, metric, metric._forward_cache, where)
        with default_dtype(self._default_dtype):
            for call, (measure, where) in forwarded.items():
                self._finish(trace, call, measure, where)

    def _finish(self, trace: StepTrace, call: Call, measure: Measure, where: Where | None) -> None:
        """Note what a call of a metric gives for the mini-batch."""
        of_mini_batch = self._of_mini_batch.get(call)
        results = self._computed(trace, measure, of_mini_batch, where)
        self.values.of_calls[call] = tensors_in(results)
        for name, metric in _members(measure).items():
            if metric is not measure:
                own = None if of_mini_batch is None else _members(of_mini_batch)[name]
                results = self._computed(trace, metric, own, where)
            metric._forward_cache = results
        if of_mini_batch is not None:
            with trace.suspended():
                type(of_mini_batch).reset(of_mini_batch)  # type: ignore[arg-type]

    def _computed(
        self, trace: StepTrace, measure: Measure, own: Measure | None, where: Where | None
    ) -> Any:
        """What a metric gives for the mini-batch, on every stage."""
        value: Any = None
        if own is not None and (where is None or trace.stage in where):
            with trace.suspended():
                value = _value_of(own)
        return self._arrived(trace, measure, value, where)

    def share(self) -> None:
        """Let every stage have the state of all metrics. Collective over the pipeline."""
        for measure in self._measures:
            for metric in _parts(measure):
                if isinstance(metric, Metric):
                    self._share(metric)

    def _attach(self, measures: Iterable[Measure]) -> None:
        for measure in measures:
            refuse(measure, self._pipeline.chunks)
            self._measures.append(measure)
            for part in _parts(measure):
                self._redirect(part, _FORWARD, self._forward)
                self._redirect(part, _UPDATE, self._update)
                self._redirect(part, _COMPUTE, self._compute)
                if isinstance(part, MetricCollection):
                    self._redirect(part, _SHARE_STATES, self._alone)
                else:
                    self._states.note(part)

    def _redirect(self, measure: Measure, name: str, run: Callable[..., Any]) -> None:
        own = measure.__dict__.get(name)
        target = partial(run, measure, getattr(measure, name))
        measure.__dict__[name] = Redirect(measure, own, target, name)
        self._replaced.append((measure, name, own))

    def _update(self, measure: Measure, update: Callable[..., Any], *args: Any, **kw: Any) -> None:
        trace = self._pipeline.step_trace
        if trace is None:
            update(*args, **kw)
            return
        where = self._note(trace, measure, args, kw)
        if values := aggregated(measure, args, kw):
            self._aggregates.take(measure, update, False, trace.micro_batch, values, where)
        elif where is None or trace.stage in where:
            with trace.suspended():
                if looks_at_all(measure, (args, kw)):
                    self._at_once.take(measure, trace.micro_batch, [update], args, kw)
                else:
                    update(*args, **kw)

    def _forward(self, measure: Measure, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        trace = self._pipeline.step_trace
        if trace is None:
            return forward(*args, **kw)
        where, value = self._note(trace, measure, args, kw), None
        if values := aggregated(measure, args, kw):
            self._aggregates.take(measure, forward, True, trace.micro_batch, values, where)
            given = torch.as_tensor(values[0], device=self._pipeline.groups.device)
            return _as_given(measure, given)
        refuse_call(measure)
        step = id(measure), trace.micro_batch
        self._calls[step] = number = self._calls.get(step, 0) + 1
        call = id(measure), number
        self._forwarded[call] = measure, where
        self._default_dtype = torch.get_default_dtype()  # that of double precision, for instance
        if where is None or trace.stage in where:
            with trace.suspended():
                blank = self._blanks.of(measure)
                if call not in self._of_mini_batch:
                    self._of_mini_batch[call] = blank.clone()
                own = self._of_mini_batch[call]
                if looks_at_all(measure, (args, kw)):
                    updates = [measure.update, own.update]
                    self._at_once.take(measure, trace.micro_batch, updates, args, kw)
                    forward = partial(_alone, blank)
                else:
                    own.update(*args, **kw)
                value = _of_micro_batch(measure, partial(forward, *args, **kw), self.values)
        result = self._arrived(trace, measure, value, where)
        self.values.give(call, result)
        return result

    def _compute(self, measure: Measure, compute: Callable[..., Any]) -> Any:
        trace = self._pipeline.step_trace
        if trace is None and self._pipeline.is_stepping:
            return compute()  # in a call of the metric
        if trace is not None:
            with trace.suspended():
                self._at_once.finish(measure)
        sources = self._sources.keys() & map(id, _members(measure).values())
        if trace is not None and sources:
            where, value = frozenset({min(self._sources[i] for i in sources)}), None
            if trace.stage in where:
                with trace.suspended():
                    value = compute()
            return self._arrived(trace, measure, value, where)
        for metric in _members(measure).values():
            self._share(metric)
        return compute()

    def _alone(self, measure: Measure, run: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Run what a collection does for itself, which need not be the same on every stage."""
        trace = self._pipeline.step_trace
        with trace.suspended() if trace is not None else nullcontext():
            return run(*args, **kw)

    def _note(self, trace: StepTrace, measure: Measure, args: Any, kw: Any) -> Where | None:
        """Which stages update a metric; None: all."""
        where = trace.where((args, kw))
        if where is not None:
            for metric in _parts(measure):
                if isinstance(metric, Metric):
                    self._sources[id(metric)] = min(where)
        return where

    def _arrived(self, trace: StepTrace, measure: Measure, value: Any, where: Where | None) -> Any:
        """A metric's value on every stage."""
        if where is None:
            return value
        name = f"metric {type(measure).__name__}"
        if trace.stage in where:
            trace.made(name, tensors_in(value), where)
            return value
        with trace.suspended():
            leaves, spec = tree_flatten(self._blanks.outline_of(measure))
            remotes = trace.remotes(leaves, where)
        trace.made(name, tensors_in(remotes), where)
        return tree_unflatten(remotes, spec)

    def _share(self, metric: Metric) -> None:
        """Take over a metric's state from the stage that has it. Collective over the pipeline."""
        source = self._sources.pop(id(metric), None)
        if source is None:
            return
        channel, state = self._pipeline.groups.pipeline, None
        if channel.index == source:
            _let_have_state(metric, self._measures)
            state = {**self._states.of(metric), "_update_count": metric._update_count}
        state = channel.broadcast("metric", state, source=source)
        if channel.index != source:
            metric.__dict__.update(state, _computed=None)


def _both(first: Follow, second: Follow, trace: StepTrace, ran: Ran) -> None:
    first(trace, ran)
    second(trace, ran)


def _of_micro_batch(measure: Measure, forward: Callable[[], Any], values: StepValues) -> Any:
    """What a metric gives for a micro-batch.

    Without torchmetrics' warnings, such as of a class that has no samples: the mini-batch may have
    some, and is updated and computed, too.

    Raises:
        ValueError: If it gives nothing for one sample, with what to do.
    """
    speaks: Any = prints.rank_zero_only  # of torchmetrics, by which rank 0 alone warns
    rank, speaks.rank = speaks.rank, 1
    try:
        return forward()
    except ValueError as error:
        if values.samples > 1:
            raise
        raise ValueError(
            f"{error} {type(measure).__name__} was given a micro-batch of one sample: lower"
            " `chunks`, so that every micro-batch has at least two, and for a small last batch use"
            " DataLoader(drop_last=True). Or call its update in the step, and log its compute() in"
            " on_train_epoch_end."
        ) from error
    finally:
        speaks.rank = rank


def _alone(blank: Measure, *args: Any, **kwargs: Any) -> Any:
    """What a metric without data gives for a call, of which it keeps nothing."""
    try:
        return blank(*args, **kwargs)
    finally:
        type(blank).reset(blank)  # type: ignore[arg-type]


def _as_given(measure: Measure, given: Tensor) -> Any:
    """What a metric of numbers gives for one of them."""
    if isinstance(measure, Metric):
        return given.to(measure.dtype)
    names = measure.keys(keep_base=False)
    dtypes = [metric.dtype for metric in _members(measure).values()]
    return {name: given.to(dtype) for name, dtype in zip(names, dtypes, strict=True)}


def _outermost(module: nn.Module) -> Iterator[Measure]:
    """The metrics of a module that aren't parts of others."""
    for child in module.children():
        if isinstance(child, (Metric, MetricCollection)):
            yield child
        else:
            yield from _outermost(child)


def _parts(measure: Measure) -> list[Measure]:
    return [m for m in measure.modules() if isinstance(m, (Metric, MetricCollection))]


def _members(measure: Measure | None) -> Mapping[str, Metric]:
    """The metrics of a collection by name, or the one."""
    if isinstance(measure, MetricCollection):
        return dict(measure.items(keep_base=True, copy_state=False))
    return {} if measure is None else {"": measure}


def _let_have_state(metric: Metric, measures: Sequence[Measure]) -> None:
    """Let a metric have the state that it shares with others of a collection."""
    for collection in (each for each in measures if isinstance(each, MetricCollection)):
        if any(part is metric for part in _parts(collection)):
            list(collection.items())


def _value_of(measure: Measure) -> Any:
    """What a metric gives this rank for what it was given, not used by anybody else."""
    for metric in _parts(measure):
        if isinstance(metric, Metric):
            metric._to_sync = metric.dist_sync_on_step  # as its forward does
            metric._update_count = metric._update_count or 1  # a collection forgets some
    return tree_map_only(Tensor, Tensor.clone, measure.compute())
