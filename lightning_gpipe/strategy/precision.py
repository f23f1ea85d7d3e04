"""Gradient clipping and loss scaling over all stages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Links

Owner = Callable[[Tensor], int | None]


class PipelinePrecision:
    """Makes a precision plugin see the gradients of all stages.

    It clips by the norm of the whole model's gradients, and a gradient scaler skips a step on every
    stage if one of them found an infinite or missing number.

    Args:
        plugin: The Trainer's precision plugin; its class stays what it is.
        owner: Tells the stage that holds a parameter; None: all do.
        links: The process groups.
    """

    def __init__(self, plugin: Precision, owner: Owner, links: Links) -> None:
        self._plugin = plugin
        plugin.__dict__["clip_grad_by_norm"] = partial(_clip_by_norm, plugin, owner, links)
        plugin.__dict__["clip_grad_by_value"] = partial(_clip_by_value, plugin)
        self._scaler = getattr(plugin, "scaler", None)
        if self._scaler is not None:
            unscale = self._scaler._unscale_grads_
            self._scaler.__dict__["_unscale_grads_"] = partial(_unscale, unscale, links)

    def remove(self) -> None:
        """Give the plugin its own methods back."""
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self._plugin.__dict__.pop(name, None)
        if self._scaler is not None:
            self._scaler.__dict__.pop("_unscale_grads_", None)


def gradient_norm(
    parameters: Sequence[Tensor], owner: Owner, links: Links, norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of a whole model's parameters. Collective over the pipeline.

    The norm of each parameter's gradient goes to every stage, and all reduce them in the same
    order, so the result is the same bit for bit whatever the number of stages. Parameters that
    every stage holds count once.

    Args:
        parameters: The whole model's, in the same order on every stage; those of other stages
            without gradient.
        owner: Tells the stage that holds a parameter; None: all do.
        links: The process groups.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        A scalar on this stage's device.
    """
    if not parameters:
        return torch.zeros((), device=links.device)
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    norms = torch.zeros(len(parameters), dtype=dtype, device=links.device)
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None and (owner(parameter) or 0) == links.stage:
            norms[i] = torch.linalg.vector_norm(parameter.grad, norm_type, dtype=dtype)
    if links.stages > 1:
        wire = norms.cpu() if links.through_host else norms
        dist.all_reduce(wire, dist.ReduceOp.SUM, links.data)
        norms = wire.to(links.device)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return total


def scale_to_norm(parameters: Iterable[Tensor], total: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Args:
        parameters: The parameters.
        total: The norm that they have.
        max_norm: The norm that they may have.
    """
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))


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
    plugin: Precision, owner: Owner, links: Links, optimizer: Optimizer, clip_val: float
) -> None:
    parameters = list(plugin.main_params(optimizer))
    scale_to_norm(parameters, gradient_norm(parameters, owner, links), clip_val)


def _clip_by_value(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    for parameter in plugin.main_params(optimizer):
        if parameter.grad is not None:
            parameter.grad.clamp_(-clip_val, clip_val)


def _unscale(
    unscale: Callable[..., dict[torch.device, Tensor]],
    links: Links,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    """Unscale this stage's gradients, and agree on whether any stage's are not finite. Collective.

    A stage without gradients has no say, but steps and scales as the others do.
    """
    found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
    anywhere = torch.stack([flag.cpu() for flag in (*found.values(), torch.zeros(()))]).max()
    if links.stages > 1:
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, links.host)
    return {links.device: anywhere.to(links.device)}
