"""What all processes of a run decide, reduce and gather, if they are connected."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.strategy import _lightning

_T = TypeVar("_T")


def barrier(device: torch.device) -> None:
    """Wait for all processes, if they are connected."""
    if not _lightning.distributed_is_initialized():
        return
    dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)


def broadcast(value: _T, source: int = 0) -> _T:
    """Give all processes an object of one, if they are connected."""
    if not _lightning.distributed_is_initialized():
        return value
    objects = [value]
    dist.broadcast_object_list(objects, source)
    return objects[0]


def agree(decision: bool, device: torch.device, all_of_them: bool) -> bool:
    """Whether all processes, or any of them, have decided so, if they are connected."""
    if not _lightning.distributed_is_initialized():
        return decision
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN if all_of_them else dist.ReduceOp.MAX)
    return bool(votes)


def reduce(tensor: Any, group: Any, operation: Any) -> Any:
    """Reduce a value over a group of processes; None: nobody else has a part of it."""
    if group is None or not isinstance(tensor, Tensor):
        return tensor
    return _lightning.reduce(tensor, group, operation)


def all_gather(tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
    """Gather a value from a group of processes; None: nobody else has a part of it.

    Returns:
        ``[processes, …]``, or the tensor itself if nobody else has a part of it.
    """
    if group is None:
        return tensor
    if sync_grads:
        gathered: Tensor = _Gathered.apply(tensor, group)
        return gathered
    return _lightning.all_gather(tensor, group)


class _Gathered(torch.autograd.Function):
    """Gathers with gradients. PyTorch's own takes the numbers of a group's processes for ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
