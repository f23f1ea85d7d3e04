"""The replicas of a stage: the same weights, other data, one average gradient.

PyTorch's own reducer does it, with its buckets, its overlap with the backward and its communication
hooks. It is told of a backward just before the last micro-batch's, so it ignores all others,
whichever of them are re-materialized. With that micro-batch runs one more node, which leads to
every parameter and gives it nothing: so every parameter reports to the reducer, used or not, when
its own gradient is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gpipe.links import Links
from lightning_gpipe.state import Slot


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What DDPStrategy users know; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        bucket_cap_mb: Size of a bucket in MiB.
        gradient_as_bucket_view: Whether gradients live in the buckets.
        broadcast_buffers: Whether every replica takes over the first one's floating-point buffers,
            such as batch-norm statistics, after each step.
        comm_hook: Communicates a bucket, ``hook(state, bucket) -> Future``.
        comm_state: Its state; ``None``: the process group of the replicas.
        comm_wrapper: Wraps the hook.
    """

    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    comm_hook: Callable[..., Any] | None
    comm_state: Any
    comm_wrapper: Callable[..., Any] | None


class Replicas:
    """Averages the gradients of one stage's own parameters over the replicas.

    Args:
        slots: What this stage alone holds of its pipeline: parameters and buffers.
        links: The process groups.
        options: What the user chose.
    """

    def __init__(self, slots: Sequence[Slot], links: Links, options: ReplicaOptions) -> None:
        parameters = [slot.tensor for slot in slots if slot.is_parameter]
        self._parameters = [
            p for p in parameters if isinstance(p, nn.Parameter) and p.is_floating_point()
        ]
        self._links = links
        self._options = options
        self._ddp: DistributedDataParallel | None = None
        self._known: set[nn.Parameter] = set()
        self._is_reduced = False

    def before_backward(self) -> None:
        """Prepare a backward that ends with an average."""
        self._is_reduced = False

    def expect_last(self) -> Tensor | None:
        """Tell the reducer that the next backward of this stage is the last one.

        Returns:
            A tensor to run that backward from, besides the micro-batch's outputs; None if there is
            nothing to average.
        """
        wanted = [p for p in self._parameters if p.requires_grad]
        if self._links.replicas == 1 or not wanted:
            return None
        if self._ddp is None or not self._known.issuperset(wanted):
            self._ddp = self._reducer_of(self._known.union(wanted))
        self._is_reduced = True
        with torch.enable_grad():  # this runs inside a backward
            end: Tensor = _Ready.apply(*wanted)
        reducer: Any = self._ddp.reducer
        reducer.prepare_for_backward([end])
        return end

    def finish(self) -> None:
        """Average the gradients, if no backward of a micro-batch did. Collective over replicas."""
        if not self._is_reduced:
            end = self.expect_last()
            if end is not None:
                torch.autograd.backward(end)

    def close(self) -> None:
        """Take the reducer's hooks off the parameters."""
        self._ddp = None

    def _reducer_of(self, parameters: set[nn.Parameter]) -> DistributedDataParallel:
        """A reducer for parameters, some of which a user may have frozen for the moment."""
        self._known = parameters
        ordered = [p for p in self._parameters if p in parameters]
        frozen = [p for p in ordered if not p.requires_grad]
        # One parameter that is never used keeps the reducer from warning that all are used.
        unused = nn.Parameter(torch.zeros_like(ordered[0].flatten()[:1]))
        for parameter in frozen:
            parameter.requires_grad_(True)
        options, group = self._options, self._links.across.data
        try:
            ddp = DistributedDataParallel(
                nn.ParameterList([*ordered, unused]),
                process_group=group,
                find_unused_parameters=True,  # what no replica used keeps its missing gradient
                broadcast_buffers=False,
                init_sync=False,  # they are equal already
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        hook, state = options.comm_hook, options.comm_state
        if hook is not None:
            if getattr(state, "process_group", group) is None:
                state.process_group = group  # None stands for all ranks
            wrapped = hook if options.comm_wrapper is None else options.comm_wrapper(hook)
            ddp.register_comm_hook(group if state is None else state, wrapped)
        return ddp


class _Ready(torch.autograd.Function):
    """Leads to parameters, and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def share_over_replicas(slots: Sequence[Slot], links: Links) -> None:
    """Give every replica the first one's values. Collective over the replicas of a stage.

    Args:
        slots: Parameters and buffers that this rank holds.
        links: The process groups.

    Raises:
        RuntimeError: If the replicas' modules differ.
    """
    if links.replicas == 1:
        return
    with torch.no_grad():
        for slot in slots:
            own = slot.tensor.data
            first = links.across.broadcast("state", (slot.names, own), source=0)
            if first[0] != slot.names or first[1].shape != own.shape or first[1].dtype != own.dtype:
                raise RuntimeError(
                    f"{slot.names[0]} of shape {tuple(own.shape)} on replica {links.replica} is"
                    f" {first[0][0]} of shape {tuple(first[1].shape)} on replica 0: build the same"
                    " module on every rank."
                )
            own.copy_(first[1])
    links.across.flush()


def average_over_replicas(wire: Tensor, links: Links) -> None:
    """Average a tensor in place. Collective over the replicas of a stage."""
    if links.replicas > 1:
        dist.all_reduce(wire, dist.ReduceOp.SUM, links.across.data)
        wire.div_(links.replicas)
