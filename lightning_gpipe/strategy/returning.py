"""What a run in processes of its own brings back to the one that has started them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_gpipe.strategy.monitor import PipelineMonitor


def of_run(trainer: pl.Trainer) -> dict[str, Any]:
    """What is brought back besides the weights and what Lightning takes along.

    Args:
        trainer: That of the process in which the run was.
    """
    module, is_fit = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
    return {
        "figures": [monitor.figures for monitor in _monitors(trainer)],
        "types": {name: tensor.dtype for name, tensor in _tensors(module)},
        "buffers": dict(_unsaved_buffers(module)) if is_fit else {},
        "progress": _progress(trainer) if is_fit else None,
    }


def take_types(trainer: pl.Trainer, types: dict[str, torch.dtype]) -> None:
    """Give the module the types of its tensors in the run. The tensors stay the same objects.

    Args:
        trainer: That of the process that has started the run.
        types: By the names of parameters and buffers.
    """
    module = trainer.precision_plugin.convert_module(trainer.lightning_module)
    for name, tensor in _tensors(module):
        dtype = types.get(name, tensor.dtype)
        for part in (tensor, tensor.grad):
            if part is not None and part.dtype != dtype:
                part.data = part.data.to(dtype)


def take(trainer: pl.Trainer, brought: dict[str, Any]) -> None:
    """Take over what a run has brought, besides types.

    Args:
        trainer: That of the process that has started the run.
        brought: What :func:`of_run` has returned.
    """
    # those that the module has configured are in the run's processes alone, behind the others
    for monitor, figures in zip(_monitors(trainer), brought["figures"], strict=False):
        monitor.figures = figures
    own = dict(trainer.lightning_module.named_buffers(remove_duplicate=False))
    for name, value in brought["buffers"].items():
        if name in own and not own[name].is_meta:
            own[name].data = value
    if brought["progress"] is not None:
        trainer.fit_loop.load_state_dict(brought["progress"])
        trainer.fit_loop.restarting = False


def _progress(trainer: pl.Trainer) -> dict[str, Any]:
    """The steps and epochs of a fit, without the places that its loaders have come to."""
    return {**trainer.fit_loop.state_dict(), "state_dict": {}}


def _monitors(trainer: pl.Trainer) -> list[PipelineMonitor]:
    return [each for each in vars(trainer)["callbacks"] if isinstance(each, PipelineMonitor)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def _unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict leaves out, as far as they have values here."""
    for place, owner in module.named_modules(remove_duplicate=False):
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield f"{place}.{name}".lstrip("."), buffer.detach().cpu()
