"""Metrics of torchmetrics in steps that run once per micro-batch.

A metric's update reads values, so it runs as one function, on the stages that have its arguments.
The others take over its state before it is computed. What a metric gives for one step, which is
logged with ``on_step=True``, is that of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.wrappers import Running

from lightning_gpipe.model.redirect import Redirect
from lightning_gpipe.model.remote import Where
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy.aggregates import Aggregates, aggregated

_Measure: TypeAlias = Metric | MetricCollection
_FORWARD, _UPDATE, _COMPUTE = "forward", "update", "compute"
_SHARE_STATES = "_compute_groups_create_state_ref"  # between the metrics of a collection


class StepMetrics:
    """The metrics of a module, while its steps run once per micro-batch.

    Args:
        module: The user's module.
        pipeline: The same as a pipeline.
    """

    def __init__(self, module: nn.Module, pipeline: PipelinedModule) -> None:
        self._pipeline = pipeline
        self._module = module
        self._measures: list[_Measure] = []
        self._trackers: list[MetricTracker] = []
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        # by id: the hash of a metric is that of its state
        self._sources: dict[int, int] = {}  # the stage that has the state
        self._of_mini_batch: dict[int, _Measure] = {}
        self._forwarded: dict[int, tuple[_Measure, Where | None]] = {}
        self._aggregates = Aggregates()
        # what metrics gave the steps of the mini-batch, by id, and the metric
        self._given: dict[int, tuple[Any, Metric]] = {}
        self._called: set[tuple[int, int]] = set()  # which, in which micro-batch
        self._often: set[int] = set()  # those that were called more than once in one

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
        self._aggregates.clear()
        self._given.clear()
        self._called.clear()
        self._often.clear()
        known = {id(measure) for measure in self._measures}
        if is_first:
            self._trackers = [m for m in self._module.modules() if isinstance(m, MetricTracker)]
            found = {id(measure): measure for measure in _outermost(self._module)}
            self._measures = [m for m in self._measures if id(m) in found]  # others were replaced
            self._attach(m for i, m in found.items() if i not in known)
        else:
            for tracker in self._trackers:
                self._attach(m for m in _outermost(tracker) if id(m) not in known)

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
        for aggregate, where in self._aggregates.finish(trace, sizes, weights):
            for metric in _members(aggregate).values():
                metric._forward_cache = _arrived(trace, metric, metric._forward_cache, where)
        for measure, where in forwarded.values():
            of_mini_batch = self._of_mini_batch.get(id(measure))
            for name, metric in _members(measure).items():
                value: Any = None
                if where is None or trace.stage in where:
                    own = _members(of_mini_batch)[name]
                    own._to_sync = own.dist_sync_on_step  # as a metric's own forward does
                    with trace.suspended():
                        value = own.compute()
                metric._forward_cache = _arrived(trace, metric, value, where)
            with trace.suspended():
                if of_mini_batch is not None:
                    of_mini_batch.reset()

    def share(self) -> None:
        """Let every stage have the state of all metrics. Collective over the pipeline."""
        for measure in self._measures:
            for metric in _parts(measure):
                if isinstance(metric, Metric):
                    self._share(metric)

    def _attach(self, measures: Iterable[_Measure]) -> None:
        for measure in measures:
            if any(isinstance(part, Running) for part in measure.modules()):
                raise ValueError(
                    "torchmetrics' Running counts updates, and with step='micro-batch' a mini-batch"
                    " is several: use GPipeStrategy(step='mini-batch')."
                )
            self._measures.append(measure)
            for part in _parts(measure):
                self._redirect(part, _FORWARD, self._forward)
                self._redirect(part, _UPDATE, self._update)
                self._redirect(part, _COMPUTE, self._compute)
                if isinstance(part, MetricCollection):
                    self._redirect(part, _SHARE_STATES, self._alone)

    def _redirect(self, measure: _Measure, name: str, run: Callable[..., Any]) -> None:
        own = measure.__dict__.get(name)
        target = partial(run, measure, getattr(measure, name))
        measure.__dict__[name] = Redirect(measure, own, target, name)
        self._replaced.append((measure, name, own))

    def _update(self, measure: _Measure, update: Callable[..., Any], *args: Any, **kw: Any) -> None:
        trace = self._pipeline.step_trace
        if trace is None:
            update(*args, **kw)
            return
        where = self._note(trace, measure, args, kw)
        if (value := aggregated(measure, args, kw)) is not None:
            self._aggregates.take(measure, update, False, trace.micro_batch, value, where)
        elif where is None or trace.stage in where:
            with trace.suspended():
                update(*args, **kw)

    def _forward(
        self, measure: _Measure, forward: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        trace = self._pipeline.step_trace
        if trace is None:
            return forward(*args, **kw)
        where, value = self._note(trace, measure, args, kw), aggregated(measure, args, kw)
        if value is not None:
            self._aggregates.take(measure, forward, True, trace.micro_batch, value, where)
            if isinstance(measure, Metric):
                return value
            names = measure.keys(keep_base=False)
            dtypes = [metric.dtype for metric in _members(measure).values()]
            given = torch.as_tensor(value, device=self._pipeline.groups.device)
            return {name: given.to(dtype) for name, dtype in zip(names, dtypes, strict=True)}
        self._forwarded[id(measure)] = measure, where
        if where is None or trace.stage in where:
            with trace.suspended():
                if id(measure) not in self._of_mini_batch:  # what it gives may have a graph
                    self._of_mini_batch[id(measure)] = measure.clone()
                    self._of_mini_batch[id(measure)].reset()
                value = forward(*args, **kw)
                self._of_mini_batch[id(measure)].update(*args, **kw)
        result = _arrived(trace, measure, value, where)
        self._give(measure, result, trace.micro_batch)
        return result

    def _give(self, measure: _Measure, result: Any, micro_batch: int) -> None:
        """Note what a metric gives a step."""
        metrics = list(_members(measure).values())
        results = list(result.values()) if isinstance(result, dict) else [result]
        if len(metrics) == len(results):
            self._given.update((id(r), (r, m)) for r, m in zip(results, metrics, strict=True))
        call = id(measure), micro_batch
        if call in self._called:
            self._often.update(map(id, metrics))
        self._called.add(call)

    def source_of(self, value: Any) -> Metric | None:
        """The metric that gave a step a value, as it is."""
        given = self._given.get(id(value))
        return given[1] if given is not None and given[0] is value else None

    def of_mini_batch(self, metric: Metric) -> Any:
        """What a metric gives for the mini-batch, once it is through; None: not known."""
        return None if id(metric) in self._often else metric._forward_cache

    def _compute(self, measure: _Measure, compute: Callable[..., Any]) -> Any:
        trace = self._pipeline.step_trace
        if trace is None and self._pipeline.is_stepping:
            return compute()  # in a call of the metric
        ids = map(id, _members(measure).values())
        sources = {self._sources[i] for i in ids if i in self._sources}
        if trace is not None and sources:
            where, value = frozenset({min(sources)}), None
            if trace.stage in where:
                with trace.suspended():
                    value = compute()
            return _arrived(trace, measure, value, where)
        for metric in _members(measure).values():
            self._share(metric)
        return compute()

    def _alone(self, measure: _Measure, run: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Run what a collection does for itself, which need not be the same on every stage."""
        trace = self._pipeline.step_trace
        with trace.suspended() if trace is not None else nullcontext():
            return run(*args, **kw)

    def _note(self, trace: StepTrace, measure: _Measure, args: Any, kw: Any) -> Where | None:
        """Which stages update a metric; None: all."""
        where = trace.where((args, kw))
        if where is not None:
            for metric in _parts(measure):
                if isinstance(metric, Metric):
                    self._sources[id(metric)] = min(where)
        return where

    def _share(self, metric: Metric) -> None:
        """Take over a metric's state from the stage that has it. Collective over the pipeline."""
        source = self._sources.pop(id(metric), None)
        if source is None:
            return
        channel, state = self._pipeline.groups.pipeline, None
        if channel.index == source:
            for measure in self._measures:
                if isinstance(measure, MetricCollection) and any(
                    part is metric for part in _parts(measure)
                ):
                    list(measure.items())  # lets those that share a state have it
            state = {name: getattr(metric, name) for name in metric._defaults}
            state["_update_count"] = metric._update_count
        state = channel.broadcast("metric", state, source=source)
        if channel.index != source:
            metric.__dict__.update(state, _computed=None)


def _outermost(module: nn.Module) -> Iterator[_Measure]:
    """The metrics of a module that aren't parts of others."""
    for child in module.children():
        if isinstance(child, (Metric, MetricCollection)):
            yield child
        else:
            yield from _outermost(child)


def _parts(measure: _Measure) -> list[_Measure]:
    return [m for m in measure.modules() if isinstance(m, (Metric, MetricCollection))]


def _members(measure: _Measure | None) -> Mapping[str, Metric]:
    """The metrics of a collection by name, or the one."""
    if isinstance(measure, MetricCollection):
        return dict(measure.items(keep_base=True, copy_state=False))
    return {} if measure is None else {"": measure}


def _arrived(trace: StepTrace, measure: _Measure, value: Any, where: Where | None) -> Any:
    """A metric's value on every stage.

    Stages that don't have it take it for a number, or for one of each metric of a collection.
    """
    if where is None:
        return value
    name = f"metric {type(measure).__name__}"
    if trace.stage in where:
        results = list(value.values()) if isinstance(value, dict) else [value]
        trace.made(name, [t for t in results if isinstance(t, Tensor)], where)
        return value
    keys = list(measure.keys()) if isinstance(measure, MetricCollection) else None
    with trace.suspended():
        number = torch.empty((), device="meta")
        results = [trace.remote(number, i, where) for i in range(len(keys or [""]))]
    trace.made(name, results, where)
    return results[0] if keys is None else dict(zip(keys, results, strict=True))
