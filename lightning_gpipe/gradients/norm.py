"""The norm of all gradients, over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_gpipe.comm.groups import Groups

Owner = Callable[[Tensor], int | None]


def gradient_norm(
    parameters: Sequence[Tensor], owner: Owner, groups: Groups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of a whole model's parameters. Collective over the pipeline.

    The norm of each parameter's gradient goes to every stage, and all reduce them in the same
    order, so the result is the same bit for bit whatever the number of stages. Parameters that
    every stage holds count once.

    Args:
        parameters: The whole model's, in the same order on every stage; those of other stages
            without gradient.
        owner: Tells the stage that holds a parameter; None: all do.
        groups: The process groups.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        A scalar on this stage's device.
    """
    if not parameters:
        return torch.zeros((), device=groups.device)
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    norms = torch.zeros(len(parameters), dtype=dtype, device=groups.device)
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None and (owner(parameter) or 0) == groups.stage:
            norms[i] = torch.linalg.vector_norm(parameter.grad, norm_type, dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(groups.pipeline.all_reduce(norms), norm_type)
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
