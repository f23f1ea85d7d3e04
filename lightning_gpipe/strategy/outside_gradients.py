"""Gradients that a step computes with ``torch.autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_gpipe.engine.autograd import leads_through
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy import patches


@contextmanager
def allowed(pipeline: PipelinedModule) -> Iterator[None]:
    """Allow those that don't come through the backbone, inside this context; refuse others."""
    body = pipeline.module.get_submodule(pipeline.backbone)
    outside = partial(_grad_outside, torch.autograd.grad, body)
    with patches.AUTOGRAD_GRAD.replaced(wraps(torch.autograd.grad)(outside)):
        yield


def _grad_outside(
    grad: Callable[..., Any],
    body: nn.Module,
    outputs: Tensor | Sequence[Tensor],
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute gradients with ``torch.autograd.grad``, where that doesn't lead to the backbone."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    tensors = [tensor for tensor in listed if isinstance(tensor, Tensor)]
    wanted = [inputs] if isinstance(inputs, (Tensor, GradientEdge)) else list(inputs)
    if leads_through(tensors, wanted, body):
        raise RuntimeError(
            "torch.autograd.grad through the backbone is not supported, so that losses of gradients"
            " of its input, such as penalties and forces, can't be trained by. To look at these"
            " gradients call the module outside the Trainer. Gradients of what stands behind the"
            " backbone can be computed: of its output, or of parameters outside it that only what"
            " follows uses."
        )
    return grad(outputs, inputs, *args, **kwargs)
