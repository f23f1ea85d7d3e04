"""Gradient clipping and loss scaling over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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
    gradient_norms,
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
            norms = partial(_grad_norm, gradients, groups)
            undo.enter_context(patches.GRAD_NORM.replaced(norms))
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
    found, are_given = gradient_norms(parameters, gradients(), groups, norm_type, given)
    norms = list(found[are_given])
    known = {id(parameter.grad) for parameter in parameters}
    others = [t for t in tensors if id(t) not in known]
    norms += [torch.linalg.vector_norm(t, norm_type).to(groups.device) for t in others]
    if not norms:
        return torch.zeros((), device=groups.device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        refuse_infinite(total)
    return total


def _grad_norm(
    gradients: Callable[[], ModelGradients],
    groups: Groups,
    module: nn.Module,
    norm_type: float | str,
    group_separator: str = "/",
) -> dict[str, Tensor]:
    """What Lightning's ``grad_norm`` does, over all stages. Collective over them."""
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type}: it must be more than 0.")
    prefix = f"grad_{norm_type}_norm"
    named = dict(module.named_parameters())
    norms, are_given = gradient_norms(list(named.values()), gradients(), groups, norm_type)
    found = {
        f"{prefix}{group_separator}{name}": norm.to(parameter.dtype.to_real())
        for (name, parameter), norm, is_given in zip(
            named.items(), norms, are_given.tolist(), strict=True
        )
        if is_given
    }
    if found:
        found[f"{prefix}_total"] = torch.linalg.vector_norm(norms[are_given], norm_type)
    return found


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
