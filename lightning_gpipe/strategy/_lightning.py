"""Everything that this package imports of Lightning beyond its public names.

Checked against Lightning 2.6.0 and 2.6.6; a test imports every name with the installed version.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors.signal_connector import (
    _HandlersCompose,
    _SignalConnector,
)


def seen_indices(batch_sampler: object) -> list[Any] | None:
    """The list in which Lightning keeps the indices of the samples that were read, if it does."""
    if not isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        return None
    seen: list[Any] = batch_sampler.__dict__.setdefault("seen_batch_indices", [])
    return seen


def has_no_backward(trainer: pl.Trainer) -> bool:
    """Whether no backward follows a training step."""
    return skips_backward(trainer) or not trainer.lightning_module.automatic_optimization


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether training steps run without backwards, as where batch norm is computed anew."""
    return trainer.fit_loop._skip_backward


def step_with_output(loop: Any, kwargs: dict[str, Any]) -> Any:
    """Run a training step as Lightning's loop does, which lets one process alone return None."""
    trainer = loop.trainer
    output = _call_strategy_hook(trainer, "training_step", *kwargs.values())
    return loop.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)


def logged_step(trainer: pl.Trainer) -> int:
    """The step under which loggers get what is logged now."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_of_tuner(callback: object) -> bool:
    """Whether a callback is a Tuner's, which ends the run when it has found what it looks for."""
    return bool(getattr(callback, "_early_exit", False))


seed_workers = _auto_add_worker_init_fn
all_gather = _all_gather_ddp_if_available
reduce = _sync_ddp_if_available
distributed_is_initialized = _distributed_is_initialized
default_backend = _get_default_process_group_backend_for_device
init_distributed = _init_dist_connection
ScriptLauncher = _SubprocessScriptLauncher
MockOptimizer = _MockOptimizer
MultiProcessingLauncher = _MultiProcessingLauncher
EmptyInit = _EmptyInit
HandlersCompose = _HandlersCompose
IS_INTERACTIVE = _IS_INTERACTIVE
SignalConnector = _SignalConnector

__all__ = [
    "IS_INTERACTIVE",
    "EmptyInit",
    "HandlersCompose",
    "MockOptimizer",
    "MultiProcessingLauncher",
    "ScriptLauncher",
    "SignalConnector",
    "all_gather",
    "default_backend",
    "distributed_is_initialized",
    "init_distributed",
    "is_of_tuner",
    "logged_step",
    "reduce",
    "seen_indices",
]
