"""Gradient clipping and loss scaling over all stages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.gradients.norm import (
    ModelGradients,
    gradient_norm,
    refuse_infinite,
    scale_to_norm,
)
from lightning_gpipe.model.elsewhere import is_elsewhere
from lightning_gpipe.strategy import patches


@contextmanager
def over_stages(
    plugin: Precision, module: nn.Module, gradients: Callable[[], ModelGradients], groups: Groups
) -> Iterator[None]:
    """Let gradients be clipped and scaled as those of all stages.

    The Trainer and PyTorch's own functions clip by the norm of the whole model's gradients, and a
    gradient scaler skips a step on every stage if one of them found an infinite or missing number.

    Args:
        plugin: The Trainer's precision plugin; its class stays what it is.
        module: The user's module.
        gradients: Tells where those of the whole model are.
        groups: The process groups.
    """
    scaler = getattr(plugin, "scaler", None)
    with ExitStack() as undo:
        by_norm = partial(_clip_by_norm, plugin, gradients, groups)
        undo.enter_context(patches.CLIP_BY_NORM.replaced(by_norm, plugin))
        by_value = partial(_clip_by_value, plugin)
        undo.enter_context(patches.CLIP_BY_VALUE.replaced(by_value, plugin))
        if scaler is not None:
            unscale = partial(_unscale, scaler._unscale_grads_, groups)
            undo.enter_context(patches.UNSCALE.replaced(unscale, scaler))
        if groups.stages > 1:
            total_norm = partial(_total_norm, module, gradients, groups)
            undo.enter_context(patches.TOTAL_NORM.replaced(total_norm))
            grouped = partial(_grouped, patches.CLIPPED_GROUPS.current())
            undo.enter_context(patches.CLIPPED_GROUPS.replaced(grouped))
        yield


def _grouped(
    group: Callable[..., dict[Any, Any]], lists: Sequence[Sequence[Any]], *options: Any
) -> dict[Any, Any]:
    """Tensors by device and type; PyTorch's function refuses to group none."""
    return group(lists, *options) if all(lists) else {}


@torch.no_grad()
def _total_norm(
    module: nn.Module,
    gradients: Callable[[], ModelGradients],
    groups: Groups,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """What ``torch.nn.utils.get_total_norm`` does, over all stages. Collective over them.

    Of the tensors, those that are gradients stand for their parameters: what another stage gives
    counts as well. ``clip_grad_norm_`` takes its norm from here.
    """
    norm_type = float(norm_type)  # PyTorch's takes "inf", too
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    tensors = [tensor for tensor in listed if not is_elsewhere(tensor)]
    given = {id(tensor) for tensor in tensors}
    parameters = list(module.parameters())
    norms = _norms_of_given(parameters, given, gradients(), groups, norm_type)
    known = {id(parameter.grad) for parameter in parameters}
    others = [t for t in tensors if id(t) not in known]
    norms += [torch.linalg.vector_norm(t, norm_type).to(groups.device) for t in others]
    if not norms:
        return torch.zeros((), device=groups.device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        refuse_infinite(total)
    return total


def _norms_of_given(
    parameters: Sequence[Tensor],
    given: Container[int],
    gradients: ModelGradients,
    groups: Groups,
    norm_type: float,
) -> list[Tensor]:
    """Norms of those gradients that any stage was given, in the model's order. Collective."""
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    table = torch.zeros(2, len(parameters), dtype=dtype.to_real(), device=groups.device)
    summed = gradients.summed()
    for i, parameter in enumerate(parameters):
        is_counted = gradients.is_counted_by(groups.stage, parameter)
        gradient = parameter.grad if id(parameter.grad) in given else None
        if gradient is not None and (is_counted or id(parameter) in summed):
            table[1, i] = 1
        gradient = summed.get(id(parameter), gradient)
        if gradient is not None and is_counted:
            table[0, i] = torch.linalg.vector_norm(gradient, norm_type)
    norms, is_given = groups.pipeline.all_reduce(table)
    return list(norms[is_given > 0])


def _clip_by_norm(
    plugin: Precision,
    gradients: Callable[[], ModelGradients],
    groups: Groups,
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    parameters = list(plugin.main_params(optimizer))
    scale_to_norm(parameters, gradient_norm(parameters, gradients(), groups), clip_val)


def _clip_by_value(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    for parameter in plugin.main_params(optimizer):
        if parameter.grad is not None:
            parameter.grad.clamp_(-clip_val, clip_val)


def _unscale(
    unscale: Callable[..., dict[torch.device, Tensor]],
    groups: Groups,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscale this stage's gradients, and agree on whether any stage's are not finite. Collective.

    A stage without gradients has no say, but steps and scales as the others do.
    """
    found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
    flags = [flag.to(groups.device) for flag in found.values()]
    anywhere = torch.stack([*flags, torch.zeros((), device=groups.device)]).max()
    return {groups.device: groups.pipeline.all_reduce(anywhere, dist.ReduceOp.MAX)}
