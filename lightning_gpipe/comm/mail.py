"""Messages between members of a process group, through this machine's memory where it reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.nearby import Nearby, Transfer

#: Bytes from which on a process group is as good, and doesn't hold a message once more.
_LARGE = 1 << 21


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Wait until it has arrived, or its memory may be changed."""


class PointToPoint(Protocol):
    """Messages between members of a group, as a process group has them."""

    def send(self, tensors: list[Tensor], member: int, tag: int, /) -> Work | None:
        """Send a tensor without waiting; None: there is nothing to wait for."""

    def recv(self, tensors: list[Tensor], member: int, tag: int, /) -> Work | None:
        """Receive a tensor without waiting; None: there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Mail:
    """Messages between members of a process group: through the machine's memory where it reaches.

    Args:
        group: The process group; for the other members, and for large messages.
        ranks: Global ranks of its members.
        nearby: The processes of this machine.
        number: Tells the group from others of this process.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    nearby: Nearby
    number: int

    def send(self, tensors: list[Tensor], member: int, tag: int) -> Work | None:
        """As :meth:`PointToPoint.send`."""
        rank = self.ranks[member]
        if rank in self.nearby and tensors[0].nbytes < _LARGE:
            return self.nearby.send(rank, self._key(tag), tensors[0])
        return self.group.send(tensors, member, tag)

    def recv(self, tensors: list[Tensor], member: int, tag: int) -> Work:
        """As :meth:`PointToPoint.recv`."""
        rank = self.ranks[member]
        if rank in self.nearby and tensors[0].nbytes < _LARGE:
            return self.nearby.receive(rank, self._key(tag), tensors[0])
        return self.group.recv(tensors, member, tag)

    @property
    def reaches_all(self) -> bool:
        """Whether all members are processes of this machine."""
        return all(rank == self.nearby.rank or rank in self.nearby for rank in self.ranks)

    def share(self, data: Tensor, tag: int) -> Transfer:
        """Let all other members look at a large tensor, or copy it, where it reaches them."""
        others = [rank for rank in self.ranks if rank != self.nearby.rank]
        return self.nearby.share(others, self._key(tag), data)

    def look_at(self, member: int, tag: int, count: int) -> Tensor:
        """Look at so many bytes that a member shares."""
        return self.nearby.look_at(self.ranks[member], self._key(tag), count)

    def copy_of(self, member: int, tag: int, count: int) -> Tensor:
        """Copy so many bytes that a member shares."""
        copied = torch.empty(count, dtype=torch.uint8, device="cpu")
        self.nearby.receive(self.ranks[member], self._key(tag), copied).wait()
        return copied

    def _key(self, tag: int) -> int:
        return self.number << 32 | tag
