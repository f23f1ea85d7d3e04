"""What Lightning's own callbacks need where a stage holds a part of the model.

Their attributes that aren't public are reached into here alone. What is changed is undone at the
end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.state.averages import AveragedCopy
from lightning_gpipe.strategy.summary import forward_on_meta


@contextmanager
def adapted(
    callbacks: Sequence[object],
    pipeline: PipelinedModule,
    groups: Groups,
    can_gather: Callable[[], bool],
    averages: bool,
) -> Iterator[list[AveragedCopy]]:
    """Let callbacks work on a pipeline, until the end of the run. Collective over all ranks.

    Args:
        callbacks: The Trainer's, set up.
        pipeline: The module's, not cut yet.
        groups: The process groups.
        can_gather: Tells whether the other stages can be waited for.
        averages: Whether callbacks use the averages that they keep; they may be another module's.

    Yields:
        The copies of the module that the callbacks keep.
    """
    _count_replicas(callbacks, groups.replicas, groups.stages)
    on_meta = partial(forward_on_meta, pipeline.module, pipeline.as_written, rank_zero_warn)
    with _parameters_by_identity(callbacks), _summaries_in(callbacks, on_meta):
        yield [
            AveragedCopy(copy, f"{prefix}{pipeline.backbone}", groups, can_gather)
            for copy, prefix in (_averages(callbacks) if averages else ())
        ]


def copies_module(callbacks: Iterable[object]) -> bool:
    """Whether a callback makes a copy of the module before the strategy is set up."""
    kinds = WeightAveraging, StochasticWeightAveraging
    return any(isinstance(callback, kinds) for callback in callbacks)


def _averages(callbacks: Iterable[object]) -> list[tuple[nn.Module, str]]:
    """The averages of the module that Lightning's callbacks keep.

    Returns:
        Each as a module, with the prefix of the user's names in it.
    """
    found: list[tuple[nn.Module, str]] = []
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            copy, is_wrapped = callback._average_model, isinstance(callback, WeightAveraging)
            if copy is not None:
                found.append((copy, "module." if is_wrapped else ""))
    return found


@contextmanager
def _summaries_in(
    callbacks: Iterable[object], context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let summaries of the model be made inside a context."""
    summaries = [callback for callback in callbacks if isinstance(callback, ModelSummary)]

    def make(original: Callable[..., Any], *args: Any) -> Any:
        with context():
            return original(*args)

    for callback in summaries:
        callback.__dict__["_summary"] = partial(make, callback._summary)
    try:
        yield
    finally:
        for callback in summaries:
            del callback.__dict__["_summary"]


@contextmanager
def _parameters_by_identity(callbacks: Iterable[object]) -> Iterator[None]:
    """Let fine-tuning callbacks tell parameters apart by what they are, not by their values.

    Those of other stages have none.
    """
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        yield
        return
    original = BaseFinetuning.__dict__["filter_on_optimizer"]
    setattr(BaseFinetuning, original.__name__, staticmethod(_not_in_optimizer))
    try:
        yield
    finally:
        setattr(BaseFinetuning, original.__name__, original)


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in known]


def _count_replicas(callbacks: Iterable[object], replicas: int, stages: int) -> None:
    """Let monitors of throughput take a pipeline for one device.

    They count the samples of every process, and the stages of a pipeline work on the same.

    Args:
        callbacks: The Trainer's, set up.
        replicas: D.
        stages: K.
    """
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = replicas
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * stages
