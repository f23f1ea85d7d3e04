"""What can't work, refused before training starts, with what to do instead."""

from __future__ import annotations

from collections.abc import Container, Iterable
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_gpipe.gradients.data_parallel import DataParallelOptions
from lightning_gpipe.plan.fitting import usable_memory
from lightning_gpipe.plan.settings import Settings, check_flag
from lightning_gpipe.strategy.world import Layout

_OTHER_PRECISIONS = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MOST_MIB = 2**43  # PyTorch counts bytes in 64 bits
_READS_ITSELF = "dataloader_iter"  # what Lightning knows a step by that does


def refuse(
    trainer: pl.Trainer,
    layer_sync: object | None,
    layout: Layout,
    without_sync: Container[str],
    settings: Settings,
) -> None:
    """Refuse what can't work in a run, before the module is touched.

    Args:
        trainer: The Trainer, with its module.
        layer_sync: Its plugin that would synchronize batch norm.
        layout: The processes. What needs the whole model in one has it where there is one stage.
        without_sync: Types of devices for which PyTorch has no SyncBatchNorm.
        settings: What the user chose.

    Raises:
        ValueError: With what to do instead.
    """
    module, device = trainer.lightning_module, trainer.strategy.root_device
    refuse_synchronized(module, layer_sync, device, layout.replicas, without_sync)
    refuse_precision(trainer.precision_plugin)
    if settings.step == "micro-batch":
        refuse_steps(trainer)
    if layout.stages > 1:
        refuse_logging(module, trainer.loggers)
        refuse_callbacks(vars(trainer)["callbacks"], settings)


def refuse_unknown_memory(settings: Settings, device: torch.device) -> None:
    """Refuse a choice by memory where nobody says how much there is.

    Raises:
        ValueError: With what to do instead.
    """
    is_unknown = settings.limit is None and usable_memory(device) is None
    if settings.checkpoint == "auto" and is_unknown:
        raise ValueError(
            "checkpoint='auto' re-materializes as few micro-batches as fit in memory, and how much"
            f" a stage may fill isn't known on '{device}': give GPipeStrategy(memory_limit=...),"
            " such as '16GB'."
        )


def refuse_steps(trainer: pl.Trainer) -> None:
    """Refuse what steps need that see the whole mini-batch, or their own backward.

    Raises:
        ValueError: With what to do instead.
    """
    module, remedy = trainer.lightning_module, "use GPipeStrategy(step='mini-batch')."
    if not module.automatic_optimization:
        raise ValueError(
            "Manual optimization runs backwards inside the step, and with step='micro-batch' the"
            f" strategy runs them while other micro-batches are under way: {remedy}"
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which step='micro-batch' doesn't call:"
            f" {remedy}"
        )
    for name in _STEPS:
        step = getattr(module, name)  # None: Lightning leaves out what it is for
        if step and is_param_in_hook_signature(step, _READS_ITSELF, explicit=True):
            raise ValueError(
                f"{name}(self, {_READS_ITSELF}) reads its batches itself, so step='micro-batch'"
                f" can't split them: {remedy}"
            )
    for callback in vars(trainer)["callbacks"]:
        if isinstance(callback, BatchSizeFinder):
            raise ValueError(
                "BatchSizeFinder runs out of memory on purpose, from which step='micro-batch' can't"
                f" go on: to search for the batch size {remedy}"
            )


def refuse_options(options: DataParallelOptions, settings: Settings) -> None:
    """Refuse options of the replicas that PyTorch's reducer would misread, or that can't work.

    Raises:
        ValueError: With what the argument may be, or what to do instead.
    """
    for name in ("gradient_as_bucket_view", "broadcast_buffers"):
        check_flag(name, getattr(options, name))
    size: Any = options.bucket_cap_mb
    is_size = isinstance(size, Real) and not isinstance(size, bool) and 0 <= float(size) < _MOST_MIB
    if size is not None and not is_size:
        raise ValueError(
            f"bucket_cap_mb must be None or a number of MiB, got bucket_cap_mb={size!r}."
        )
    for name in ("comm_hook", "comm_wrapper"):
        value = getattr(options, name)
        if not (value is None or callable(value)):
            raise ValueError(f"ddp_{name} must be None or a function, got ddp_{name}={value!r}.")
    refuse_comm_state(options.comm_state, settings)


def refuse_comm_state(state: object, settings: Settings) -> None:
    """Refuse a state of a communication hook where a stage has several reducers.

    Raises:
        ValueError: With what to do instead.
    """
    several = settings.virtual_stages > 1 or settings.step == "micro-batch"
    if several and state is not None and not isinstance(state, dist.ProcessGroup):
        raise ValueError(
            f"ddp_comm_state={type(state).__name__} counts the buckets of one reducer, and with"
            " virtual_stages or step='micro-batch' a stage has several: leave it out, with a hook"
            " that needs none."
        )


def refuse_synchronized(
    module: nn.Module,
    layer_sync: object | None,
    device: torch.device,
    replicas: int,
    without_sync: Container[str],
) -> None:
    """Refuse batch norm over replicas where it can't work.

    Args:
        module: The user's module.
        layer_sync: The Trainer's plugin that would synchronize its batch norm.
        device: Where the layers run.
        replicas: D.
        without_sync: Types of devices for which PyTorch has no SyncBatchNorm.

    Raises:
        ValueError: With what to do instead.
    """
    own = any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
    if device.type in without_sync and (own or layer_sync is not None):
        raise ValueError(
            "sync_batchnorm=True (or SyncBatchNorm) needs GPUs. Leave it out:"
            " deferred_batch_norm=True keeps the running statistics of a replica's whole"
            " mini-batch, and broadcast_buffers=True keeps replicas alike."
        )
    if own and replicas == 1:
        raise ValueError(
            "SyncBatchNorm normalises over replicas, and there is only one: build the module with"
            " BatchNorm, or use more devices than stages."
        )


def refuse_precision(plugin: object) -> None:
    """Refuse precision plugins that are made for another strategy, or replace layers.

    Raises:
        ValueError: With what to do instead.
    """
    if isinstance(plugin, _OTHER_PRECISIONS):
        raise ValueError(
            f"{type(plugin).__name__} isn't for GPipeStrategy: choose Trainer(precision=...) among"
            " '64-true', '32-true', '16-true', 'bf16-true', '16-mixed' and 'bf16-mixed'."
        )


def refuse_logging(module: nn.Module, loggers: Iterable[object]) -> None:
    """Refuse loggers that read the whole model in one process.

    Raises:
        ValueError: With what to do instead.
    """
    for name, part in module.named_modules():
        watched = getattr(part, "_wandb_hook_names", ())
        if any(hook.startswith("parameters/") for hook in watched):
            raise ValueError(
                f"wandb.watch logs the parameters of {name or 'the module'} on rank 0, and other"
                " stages hold some of them: give it log='gradients', which logs those of the first"
                " stage."
            )
    boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
    traces = any(board._log_graph for board in boards)
    if traces and getattr(module, "example_input_array", None) is not None:
        raise ValueError(
            "TensorBoardLogger(log_graph=True) traces the whole model in one process, and it is"
            " spread over stages: log the graph before the Trainer runs, with"
            " logger.log_graph(module) on rank 0."
        )


def refuse_callbacks(callbacks: Iterable[object], settings: Settings) -> None:
    """Refuse callbacks that need the whole model.

    Raises:
        ValueError: With what to do instead.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                "ModelPruning replaces parameters and ranks the weights of the whole model, which"
                " are spread over the stages: prune the trained model with torch.nn.utils.prune."
            )
        if isinstance(callback, BatchSizeFinder) and settings.chunks == "auto":
            raise ValueError(
                "BatchSizeFinder begins with a small batch, for which chunks='auto' would choose"
                " the number of micro-batches: give GPipeStrategy(chunks=...) a number."
            )


def refuse_copies_of_nothing(module: nn.Module) -> None:
    """Refuse callbacks that copy a module before its layers have values.

    Args:
        module: The user's, before the run.

    Raises:
        ValueError: With what to do instead.
    """
    if any(tensor.is_meta for tensor in module.parameters()):
        raise ValueError(
            "A callback that averages weights copies the module before the run, when its layers"
            " stand on the meta device, without values: build them in the constructor, on the host."
        )


def refuse_sampler(dataloader: Any, replicas: int, replica: int) -> None:
    """Refuse a sampler that shares the data out between the wrong processes.

    Args:
        dataloader: The user's, or a part of it.
        replicas: D.
        replica: This rank's pipeline.

    Raises:
        ValueError: With what to do instead.
    """
    sampler = getattr(dataloader, "sampler", None)
    inner = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
    for found in (sampler, inner, getattr(dataloader, "batch_sampler", None)):
        shares, share = getattr(found, "num_replicas", None), getattr(found, "rank", None)
        if isinstance(shares, int) and isinstance(share, int):
            if (shares, share) != (replicas, replica):
                raise ValueError(
                    f"{type(found).__name__}(num_replicas={shares}, rank={share}) shares the data"
                    " out between processes, but the stages of a pipeline read the same, so it must"
                    f" be num_replicas={replicas}, rank={replica} here. Leave the sampler to"
                    " Lightning, or build it with **trainer.distributed_sampler_kwargs."
                )
            return
