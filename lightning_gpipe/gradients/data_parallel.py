"""The replicas of a stage: the same weights, other data, one average gradient.

PyTorch's own reducer does it, with its buckets, its overlap with the backward and its communication
hooks. It is told of a backward just before the last micro-batch's, so it ignores all others,
whichever of them are re-materialized. With that micro-batch runs one more node, which leads to
every parameter and gives it nothing: so every parameter reports to the reducer, used or not, when
its own gradient is complete. What no replica used is told apart afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.parameters import Slot, parameters_of


@dataclass(frozen=True, slots=True)
class DataParallelOptions:
    """What DDPStrategy users know; see :class:`torch.nn.parallel.DistributedDataParallel`.

    Args:
        bucket_cap_mb: Size of a bucket in MiB.
        gradient_as_bucket_view: Whether gradients live in the buckets.
        broadcast_buffers: Whether every replica takes over the first one's buffers, such as
            batch-norm statistics.
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


class DataParallel:
    """Averages the gradients of one stage's own parameters over the replicas.

    Args:
        slots: What this stage alone holds of its pipeline: parameters and buffers.
        groups: The process groups.
        options: What the user chose.
    """

    def __init__(self, slots: Sequence[Slot], groups: Groups, options: DataParallelOptions) -> None:
        self._own = parameters_of(slots)
        self._groups = groups
        self._options = options
        self._ddp: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []  # that the reducer knows
        self._used: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        self._is_expected = False
        self._lent: Any = None

    def expect_last(self) -> Tensor | None:
        """Tell the reducer that the next backward of this stage is the last one.

        Returns:
            A tensor to run that backward from, besides the micro-batch's outputs; None if there is
            nothing to average.
        """
        if self._groups.replicas == 1:
            return None
        wanted = {p for p in self._own if p.requires_grad}
        if not (wanted or self._parameters):
            return None
        if not wanted.issubset(self._parameters):
            self._make_reducer(wanted.union(self._parameters))
        self._is_expected = True
        self._used = {p for p in self._parameters if p.grad is not None}
        for parameter in self._used:
            refuse_sparse(parameter)
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._note)
            for p in self._parameters
            if p.grad is None and p.requires_grad
        ]
        reducer: Any = self._ddp.reducer if self._ddp is not None else None
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        with torch.enable_grad(), _trainable(self._parameters):  # this runs inside a backward
            end: Tensor = _Ready.apply(*self._parameters)
        return end

    def _note(self, parameter: Tensor) -> None:
        """Note that a parameter has a gradient; called before the reducer gives it one."""
        if isinstance(parameter, nn.Parameter) and parameter.grad is not None:
            refuse_sparse(parameter)
            self._used.add(parameter)

    def finish(self) -> None:
        """End a backward with the average. Collective over the replicas.

        A gradient that is missing on some replicas counts as zeros there; on all, it stays missing.
        """
        if not self._is_expected:  # no micro-batch went backward
            end = self.expect_last()
            if end is None:
                return
            torch.autograd.backward(end)
        self._is_expected = False
        for hook in self._hooks:
            hook.remove()
        own = [p in self._used for p in self._parameters]
        used = torch.tensor(own, dtype=torch.uint8, device="cpu")
        used = self._groups.siblings.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, anywhere in zip(self._parameters, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None

    def close(self) -> None:
        """Take the reducer's hooks off the parameters, and the group out of the user's state."""
        self._ddp = None
        if self._lent is not None:
            self._lent.process_group, self._lent = None, None

    def _make_reducer(self, parameters: set[nn.Parameter]) -> None:
        """Make a reducer for parameters, some of which a user may have frozen for the moment."""
        self._parameters = [p for p in self._own if p in parameters]
        options, group = self._options, self._groups.siblings.data
        with _trainable(self._parameters), warnings.catch_warnings():
            # newer versions of PyTorch have another name for what this one has, too
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            self._ddp = DistributedDataParallel(
                nn.ParameterList(self._parameters),
                process_group=group,
                broadcast_buffers=False,
                init_sync=False,  # they are equal already
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
            )
        hook, state = options.comm_hook, options.comm_state
        if hook is not None:
            if getattr(state, "process_group", group) is None:  # stands for all ranks
                state.process_group, self._lent = group, state
            wrapped = hook if options.comm_wrapper is None else options.comm_wrapper(hook)
            self._ddp.register_comm_hook(group if state is None else state, wrapped)


@contextmanager
def _trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let parameters require a gradient that a user has frozen for the moment."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class _Ready(torch.autograd.Function):
    """Leads to parameters, and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def refuse_sparse(parameter: Tensor) -> None:
    """Refuse a gradient that can't be summed.

    Raises:
        RuntimeError: With what to do instead.
    """
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise RuntimeError(
            f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, which can't be"
            " summed over processes: build its nn.Embedding with sparse=False."
        )
