"""What ranks tell each other of steps that run once per micro-batch."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.running import Running
from lightning_gpipe.model.remote import Number
from lightning_gpipe.model.step_trace import StepTrace

_OTHER_NUMBERS = (
    "In the step stage {own} computes with other numbers than stage {other}, and each computes a"
    " part of it: the loss or the gradients may be wrong. They come of something that differs"
    " between processes, such as a random generator that the step makes without a seed, the time,"
    " the rank, or the order of a set. Seed it, or let the loader give the numbers."
)
_SMALL, _FEW = 1 << 16, 256  # bytes and values that the source needn't wait for


class _Told(NamedTuple):
    """The values that a rank tells the others.

    Args:
        mark: What tells whether they have called the same functions.
        numbers: And whether with the same numbers, if that is looked at.
        single: Values by their numbers.
        scalars: Those without dimensions, as losses are: numbers, and tensors ``[n]`` of them.
    """

    mark: int
    numbers: int
    single: dict[Number, Tensor]
    scalars: list[tuple[list[Number], Tensor]]

    @classmethod
    def of(cls, trace: StepTrace) -> _Told:
        """What is left of the values that this rank tells."""
        single, alike = dict[Number, Tensor](), defaultdict[Any, dict[Number, Tensor]](dict)
        for number, value in trace.values.left().items():
            is_plain = type(value) is Tensor and value.ndim == 0 and not value.is_quantized
            (alike[value.dtype, value.device] if is_plain else single)[number] = value
        scalars = [([*found], torch.stack([*found.values()])) for found in alike.values()]
        return cls(trace.mark, trace.numbers, single, scalars)

    def values(self) -> dict[Number, Tensor]:
        """All of them again, each in memory of its own."""
        values = dict(self.single)
        for numbers, scalars in self.scalars:
            values |= zip(numbers, (t.clone() for t in scalars.unbind()), strict=True)
        return values


def agree_on_weights(groups: Groups, is_weighted: bool) -> None:
    """Check that steps return weights on all replicas or on none. Collective over them.

    With weights, gradients are averaged later than without.
    """
    if groups.replicas == 1:
        return
    flags = torch.tensor([is_weighted, not is_weighted], dtype=torch.uint8, device="cpu")
    if groups.siblings.reduce_in_host(flags, dist.ReduceOp.MAX).all():
        raise RuntimeError(
            "The step returned a weight on some replicas and none on others: return one on each, 0"
            " where nothing counts."
        )


def share_weights(running: Running, groups: Groups) -> None:
    """Let every rank know the weights that the step returned. Collective, if there are any."""
    if not running.is_weighted:
        return
    if any(outcome.weight is None for outcome in running.outcomes.values()):
        raise RuntimeError(
            "The step returned a weight for some micro-batches and none for others: return one for"
            " each, 0 where nothing counts."
        )
    last = groups.stages - 1
    own = running.weighting.weights if groups.is_last else None
    running.weighting.take_over(groups.pipeline.broadcast("weights", own, source=last))


@torch.no_grad()
def tell_ahead(running: Running, trace: StepTrace, groups: Groups) -> None:
    """Tell the last stage's values as soon as its steps have run, if nobody waits for that.

    Its backwards may take longer than those of other ranks, which can go on to the next mini-batch.
    """
    if not groups.is_last or groups.stages == 1 or running.is_weighted:
        return
    told = _Told.of(trace)
    tensors = [*told.single.values(), *(scalars for _, scalars in told.scalars)]
    in_host = all(groups.pipeline.is_in_host(tensor.device.type) for tensor in tensors)
    if in_host and sum(t.nbytes for t in tensors) <= _SMALL and len(tensors) <= _FEW:
        groups.pipeline.broadcast("told", told, source=groups.stages - 1)
        running.has_told = True


@torch.no_grad()
def tell(running: Running, trace: StepTrace, groups: Groups) -> None:
    """Tell all ranks the values that are left of the steps. Collective."""
    if groups.stages > 1:
        last = groups.stages - 1
        for source in (last, *sorted(trace.sources - {last})):
            if source == groups.stage == last and running.has_told:
                continue
            own = _Told.of(trace) if source == groups.stage else None
            told = groups.pipeline.broadcast("told", own, source=source)
            if told.mark != trace.mark:
                raise RuntimeError(
                    f"The step called other functions on stage {groups.stage} than on stage"
                    f" {source}: it must do the same on every rank, so nothing under"
                    " `if rank == 0`, and not use what layers or hooks keep of the forward: return"
                    " that with the backbone's output."
                )
            if told.numbers != trace.numbers and not trace.has_warned:
                trace.has_warned = True
                warnings.warn(_OTHER_NUMBERS.format(own=groups.stage, other=source), stacklevel=2)
            if source != groups.stage:
                trace.values.tell(told.values())
    trace.forget()
