"""Gradient clipping and loss scaling over all stages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.gradients.norm import Owner, gradient_norm, scale_to_norm


class PipelinePrecision:
    """Makes a precision plugin see the gradients of all stages.

    It clips by the norm of the whole model's gradients, and a gradient scaler skips a step on every
    stage if one of them found an infinite or missing number.

    Args:
        plugin: The Trainer's precision plugin; its class stays what it is.
        owner: Tells the stage that holds a parameter; None: all do.
        groups: The process groups.
    """

    def __init__(self, plugin: Precision, owner: Owner, groups: Groups) -> None:
        self._plugin = plugin
        plugin.__dict__["clip_grad_by_norm"] = partial(_clip_by_norm, plugin, owner, groups)
        plugin.__dict__["clip_grad_by_value"] = partial(_clip_by_value, plugin)
        self._scaler = getattr(plugin, "scaler", None)
        if self._scaler is not None:
            unscale = self._scaler._unscale_grads_
            self._scaler.__dict__["_unscale_grads_"] = partial(_unscale, unscale, groups)

    def remove(self) -> None:
        """Give the plugin its own methods back."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self._plugin.__dict__.pop(name, None)
        if self._scaler is not None:
            self._scaler.__dict__.pop("_unscale_grads_", None)


@contextmanager
def one_stage_norms_refused() -> Iterator[None]:
    """Refuse PyTorch's own clipping of parameters of which other stages hold some."""
    clip_grad = importlib.import_module("torch.nn.utils.clip_grad")
    name = "_clip_grads_with_norm_"  # looked up here however clip_grad_norm_ was imported
    original = getattr(clip_grad, name)

    def checked(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(p.is_meta for p in parameters):
            raise RuntimeError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of one stage: use"
                " trainer.strategy.clip_grad_norm_, which is right over all, self.clip_gradients or"
                " Trainer(gradient_clip_val=...)."
            )
        original(parameters, *args, **kwargs)

    setattr(clip_grad, name, checked)
    try:
        yield
    finally:
        setattr(clip_grad, name, original)


def _clip_by_norm(
    plugin: Precision, owner: Owner, groups: Groups, optimizer: Optimizer, clip_val: float
) -> None:
    parameters = list(plugin.main_params(optimizer))
    scale_to_norm(parameters, gradient_norm(parameters, owner, groups), clip_val)


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
