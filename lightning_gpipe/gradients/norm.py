"""The norm of all gradients, over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_gpipe.comm.groups import Groups


@dataclass(frozen=True, slots=True)
class ModelGradients:
    """Where the gradients of a whole model's parameters are.

    Args:
        owner: Tells the stage that holds a parameter; None: all do.
        summed: Gradients of which each stage has a part as yet, whole, by the ``id`` of their
            parameters. Collective over the pipeline.
    """

    owner: Callable[[Tensor], int | None]
    summed: Callable[[], Mapping[int, Tensor]]

    def is_counted_by(self, stage: int, parameter: Tensor) -> bool:
        """Whether this stage is the one that counts a parameter's gradient."""
        return (self.owner(parameter) or 0) == stage


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[Tensor], gradients: ModelGradients, groups: Groups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of a whole model's parameters. Collective over the pipeline.

    The norm of each parameter's gradient goes to every stage, and all reduce them in the same
    order, so the result is the same bit for bit whatever the number of stages. Parameters that
    every stage holds count once.

    Args:
        parameters: The whole model's, in the same order on every stage; those of other stages
            without gradient.
        gradients: Where their gradients are.
        groups: The process groups.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        A scalar on this stage's device.
    """
    norm_type = float(norm_type)  # PyTorch's functions take "inf", too
    dtype = reduce(torch.promote_types, (p.dtype.to_real() for p in parameters), torch.float32)
    norms = torch.zeros(len(parameters), dtype=dtype, device=groups.device)
    summed = gradients.summed()
    here = [
        (i, _entries(gradient))
        for i, p in enumerate(parameters)
        if (gradient := summed.get(id(p), p.grad)) is not None
        and gradients.is_counted_by(groups.stage, p)
    ]
    if here:
        indices, entries = zip(*here, strict=True)
        found = torch._foreach_norm(list(entries), norm_type, dtype=dtype)
        norms[list(indices)] = torch.stack(list(found)).to(norms.device)
    norms = groups.pipeline.all_reduce(norms) if len(parameters) else norms
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return total


def _entries(gradient: Tensor) -> Tensor:
    """Real numbers that have the gradient's norm."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return gradient.abs() if gradient.is_complex() else gradient


def scale_to_norm(
    parameters: Iterable[Tensor], total: Tensor, max_norm: float, only_finite: bool = False
) -> None:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Args:
        parameters: The parameters.
        total: The norm that they have.
        max_norm: The norm that they may have.
        only_finite: Whether an infinite norm is an error.

    Raises:
        RuntimeError: If it is one.
    """
    if only_finite:
        refuse_infinite(total)
    held = [p for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, total)


def refuse_infinite(total: Tensor) -> None:
    """Refuse to clip gradients by a norm that isn't finite.

    Raises:
        RuntimeError: With what to do instead.
    """
    if not total.isfinite():
        raise RuntimeError(
            f"The norm of the gradients is {total.item()}, so they can't be clipped: look for the"
            " first step with an infinite loss, or give error_if_nonfinite=False."
        )
