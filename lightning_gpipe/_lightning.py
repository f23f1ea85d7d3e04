"""Everything that this package uses of Lightning beyond its public names.

Checked against Lightning 2.6.0 and 2.6.6; a test imports every name with the installed version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import (
    _HandlersCompose,
    _SignalConnector,
)
from torch import Tensor, nn
from torch.optim import Optimizer


def copies_module(callbacks: Iterable[object]) -> bool:
    """Whether a callback makes a copy of the module before the strategy is set up."""
    kinds = WeightAveraging, StochasticWeightAveraging
    return any(isinstance(callback, kinds) for callback in callbacks)


def averages(callbacks: Iterable[object]) -> list[tuple[nn.Module, str]]:
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
def summaries_in(
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


def seen_indices(batch_sampler: object) -> list[Any] | None:
    """The list in which Lightning keeps the indices of the samples that were read, if it does."""
    if not isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        return None
    seen: list[Any] = batch_sampler.__dict__.setdefault("seen_batch_indices", [])
    return seen


@contextmanager
def parameters_by_identity(callbacks: Iterable[object]) -> Iterator[None]:
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


def count_replicas(callbacks: Iterable[object], replicas: int, stages: int) -> None:
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


all_gather = _all_gather_ddp_if_available
reduce = _sync_ddp_if_available
distributed_is_initialized = _distributed_is_initialized
default_backend = _get_default_process_group_backend_for_device
init_distributed = _init_dist_connection
ScriptLauncher = _SubprocessScriptLauncher
MultiProcessingLauncher = _MultiProcessingLauncher
HandlersCompose = _HandlersCompose
SignalConnector = _SignalConnector

__all__ = [
    "HandlersCompose",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "SignalConnector",
    "all_gather",
    "averages",
    "copies_module",
    "count_replicas",
    "default_backend",
    "distributed_is_initialized",
    "init_distributed",
    "parameters_by_identity",
    "reduce",
    "reset_seed",
    "seen_indices",
    "summaries_in",
]
