"""What a run in processes of its own brings back to the one that has started them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
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
        "shapes": {name: buffer.shape for name, buffer in _buffers(module)} if is_fit else None,
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


def take_new_buffers(
    module: nn.Module, shapes: Mapping[str, torch.Size] | None, weights: str | Path | None
) -> None:
    """Give the module the buffers that it got in the run, or that have another shape now.

    Args:
        module: That of the process that has started the run.
        shapes: Of the run's buffers, by their names; None: it was no fit.
        weights: The file with the run's weights.
    """
    if shapes is None or weights is None:
        return
    own = {name: buffer.shape for name, buffer in _buffers(module)}
    for name in own.keys() - shapes.keys():
        _set(module, name, None)
    new = {name for name, shape in shapes.items() if own.get(name) != shape}
    if new:
        for name, value in torch.load(weights, weights_only=False, mmap=True).items():
            if name in new:
                _set(module, name, value.clone())


def _set(module: nn.Module, name: str, value: Tensor | None, is_saved: bool = True) -> None:
    path, _, key = name.rpartition(".")
    part = dict(module.named_modules(remove_duplicate=False)).get(path)
    if part is not None:  # else it was built in the run
        part._buffers[key] = value
        if not is_saved:
            part._non_persistent_buffers_set.add(key)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def take(trainer: pl.Trainer, brought: dict[str, Any]) -> None:
    """Take over what a run has brought, besides types.

    Args:
        trainer: That of the process that has started the run.
        brought: What :func:`of_run` has returned.
    """
    # those that the module has configured are in the run's processes alone, behind the others
    for monitor, figures in zip(_monitors(trainer), brought["figures"], strict=False):
        monitor.figures = figures
    own = dict(_buffers(trainer.lightning_module))
    for name, value in brought["buffers"].items():
        if name not in own:
            _set(trainer.lightning_module, name, value, is_saved=False)
        elif not own[name].is_meta:
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
        _buffers(module),
    )


def _unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict leaves out, as far as they have values here."""
    for place, owner in module.named_modules(remove_duplicate=False):
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield f"{place}.{name}".lstrip("."), buffer.detach().cpu()
