"""The norm of all gradients, over all stages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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


def gradient_norm(
    parameters: Sequence[Tensor], gradients: ModelGradients, groups: Groups, norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of a whole model's parameters. Collective over the pipeline.

    See :func:`gradient_norms` for the arguments.

    Returns:
        A scalar on this stage's device. What has no gradient counts as zero.
    """
    norms, _ = gradient_norms(parameters, gradients, groups, norm_type)
    total: Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    return total


@torch.no_grad()
def gradient_norms(
    parameters: Sequence[Tensor],
    gradients: ModelGradients,
    groups: Groups,
    norm_type: float = 2.0,
    given: Container[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of each gradient of a whole model's parameters. Collective over the pipeline.

    They go to every stage, and all reduce them in the same order, so what is made of them is the
    same bit for bit whatever the number of stages. Parameters that every stage holds count once.

    Args:
        parameters: The whole model's, in the same order on every stage; those of other stages
            without gradient.
        gradients: Where their gradients are.
        groups: The process groups.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        given: The gradients that are asked for, by id; None: all.

    Returns:
        One for each parameter, on this stage's device, 0 where it has none; and where any stage has
        one that is asked for.
    """
    norm_type = float(norm_type)  # PyTorch's functions take "inf", too
    dtype = reduce(torch.promote_types, (p.dtype.to_real() for p in parameters), torch.float32)
    table = torch.zeros(2, len(parameters), dtype=dtype, device=groups.device)
    summed = gradients.summed()
    given_here: list[int] = []
    counted: dict[int, Tensor] = {}
    for i, parameter in enumerate(parameters):
        is_counted = gradients.is_counted_by(groups.stage, parameter)
        gradient = parameter.grad
        if given is not None and id(gradient) not in given:
            gradient = None
        if gradient is not None and (is_counted or id(parameter) in summed):
            given_here.append(i)
        gradient = summed.get(id(parameter), gradient)
        if gradient is not None and is_counted:
            counted[i] = _entries(gradient)
    if counted:
        found = torch._foreach_norm(list(counted.values()), norm_type, dtype=dtype)
        table[0, list(counted)] = torch.stack(list(found)).to(table.device)
    if given_here:
        table[1, given_here] = 1
    norms, flags = groups.pipeline.all_reduce(table) if parameters else table
    return norms, flags > 0


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
