"""Ranks that work together, and tensors that they sum and share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Peers:
    """The stages of one pipeline, or the replicas of one stage, as one of them sees them.

    Args:
        member: What a rank is here, for errors: a "stage" or a "replica".
        index: This rank's place.
        ranks: Global rank of every member.
        device: The device of this rank.
        groups: A gloo group over the members, and one for tensors on the device: the same where
            these go through host memory. None: there is one member.
    """

    member: Literal["stage", "replica"]
    index: int
    ranks: tuple[int, ...]
    device: torch.device
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return len(self.ranks) == 1

    @property
    def host(self) -> dist.ProcessGroup:
        """The group for host memory."""
        return self._both[0]

    @property
    def data(self) -> dist.ProcessGroup:
        """The group for tensors on the device."""
        return self._both[1]

    @property
    def through_host(self) -> bool:
        """Whether tensors of the device travel through host memory."""
        return self.groups is None or self.data is self.host

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over the members. Collective.

        Args:
            tensor: Anywhere; of the same shape and type on every member. It may be overwritten.
            op: How.

        Returns:
            The result, on the tensor's device.
        """
        if self.is_alone:
            return tensor
        wire, group = self.route(tensor.device.type)
        reduced = tensor.to(wire)
        dist.all_reduce(reduced, op, group)
        return reduced.to(tensor.device)

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every member a tensor's values. Collective.

        Args:
            tensor: Contiguous; of the same shape and type on every member. It may be overwritten.
            source: The member that has them.

        Returns:
            The source's values, on the tensor's device.
        """
        if self.is_alone:
            return tensor
        wire, group = self.route(tensor.device.type)
        moved = tensor.to(wire)
        dist.broadcast(moved, self.ranks[source], group)
        return moved.to(tensor.device)

    def is_in_host(self, device_type: str) -> bool:
        """Whether tensors of a device type travel through host memory."""
        return self.through_host or device_type != self.device.type

    def route(self, device_type: str) -> tuple[torch.device, dist.ProcessGroup]:
        """Where a tensor travels: on the device if a group reaches it, else through the host."""
        return (HOST, self.host) if self.is_in_host(device_type) else (self.device, self.data)

    def name(self, index: int) -> str:
        """A member, for errors."""
        return f"{self.member} {index} (rank {self.ranks[index]})"

    @property
    def _both(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if self.groups is None:
            raise RuntimeError(f"There is one {self.member}: it has no process group to talk over.")
        return self.groups
