"""Ranks that work together, and tensors that they sum and share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_gpipe.comm.mail import Mail, PointToPoint, Work
from lightning_gpipe.comm.nearby import Nearby, Transfer

HOST = torch.device("cpu")
#: Bytes up to which a message to each member is faster than gloo's collectives, ten times and more.
SMALL = 1 << 16
#: Bytes of small tensors that travel as one message.
_BUCKET = 1 << 25
#: The tag of these messages.
_TAG = 0


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
        mail: How messages in host memory go from member to member; None: over the gloo group.
    """

    member: Literal["stage", "replica"]
    index: int
    ranks: tuple[int, ...]
    device: torch.device
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    mail: Mail | None = None

    def by_mail(self, nearby: Nearby, number: int) -> Self:
        """The same, with messages through the memory of this machine as far as it reaches.

        Args:
            nearby: The processes of this machine.
            number: Tells these peers from others of this process.
        """
        if self.groups is None:
            return self
        return dataclasses.replace(self, mail=Mail(self.host, self.ranks, nearby, number))

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
            op: SUM or MAX.

        Returns:
            The result, on the tensor's device.
        """
        if self.is_alone:
            return tensor
        wire, group = self.route(tensor.device.type)
        if group is self.host:
            return self.reduce_in_host(tensor.to(wire), op).to(tensor.device)
        reduced = tensor.to(wire)
        dist.all_reduce(reduced, op, group)
        return reduced.to(tensor.device)

    def reduce_in_host(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor in host memory, which may be overwritten. Collective."""
        if self.is_alone:
            return tensor
        if tensor.nbytes <= SMALL:
            return self._exchanged(tensor.contiguous(), op)
        dist.all_reduce(tensor, op, self.host)
        return tensor

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Give every member the values of one's tensors, in place and in few messages. Collective.

        Args:
            tensors: Of the same shapes and types on every member, in the same order.
            source: The member whose values all take over.
        """
        for bucket in _buckets([] if self.is_alone else tensors):
            parts = [tensor.detach().reshape(-1) for tensor in bucket]
            flat = torch.cat(parts) if parts[1:] else parts[0].contiguous()
            wire, group = self.route(flat.device.type)
            data = flat.view(torch.uint8).to(wire)  # not every type can be sent
            dist.broadcast(data, self.ranks[source], group)
            values = data.to(flat.device).view(flat.dtype)
            if self.index != source:
                news = values.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, news, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def is_in_host(self, device_type: str) -> bool:
        """Whether tensors of a device type travel through host memory."""
        return self.through_host or device_type != self.device.type

    def route(self, device_type: str) -> tuple[torch.device, dist.ProcessGroup]:
        """Where a tensor travels: on the device if a group reaches it, else through the host."""
        return (HOST, self.host) if self.is_in_host(device_type) else (self.device, self.data)

    def name(self, index: int) -> str:
        """A member, for errors."""
        return f"{self.member} {index} (rank {self.ranks[index]})"

    # These do what dist.isend and dist.irecv do, whose checks take as long as the rest.

    def post(self, data: Tensor, to: int) -> Work | None:
        """Send bytes in host memory to a member, without waiting; None: nothing to wait for."""
        return self._mail.send([data], to, _TAG) if data.numel() else None

    def await_from(self, source: int, data: Tensor) -> Tensor:
        """Wait for what a member sends to this one with :meth:`post`.

        Args:
            source: The member.
            data: Where it goes, in host memory.
        """
        work = self._mail.recv([data], source, _TAG) if data.numel() else None
        if work is not None:
            work.wait()
        return data

    @property
    def has_one_memory(self) -> bool:
        """Whether all members are on one machine, and can look at each other's memory."""
        return self.mail is not None and self.mail.reaches_all

    def show(self, data: Tensor) -> Transfer:
        """Let all other members look at bytes in host memory, which may be changed at once.

        Args:
            data: More than 4 KiB, where :attr:`has_one_memory`.

        Returns:
            What tells when nobody looks at them any longer.
        """
        return self._shared.share(data, _TAG)

    def look_at(self, source: int, count: int) -> Tensor:
        """Wait for bytes that a member shows; to change them changes nobody else's."""
        return self._shared.look_at(source, _TAG, count)

    def copy_of(self, source: int, count: int) -> Tensor:
        """Wait for bytes that a member shows, and copy them."""
        return self._shared.copy_of(source, _TAG, count)

    def _exchanged(self, own: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a small tensor in host memory: every member sends it to every other."""
        if not own.numel():
            return own
        parts = [own if i == self.index else torch.empty_like(own) for i in range(len(self.ranks))]
        others = [i for i in range(len(self.ranks)) if i != self.index]
        work = [self._mail.recv([parts[i]], i, _TAG) for i in others]
        work += [self._mail.send([own], i, _TAG) for i in others]
        for one in work:
            if one is not None:
                one.wait()
        rows = torch.stack(parts)  # in the order of the members: the same bits on each
        if op == dist.ReduceOp.SUM:
            return rows.sum(0, dtype=own.dtype)
        return rows.amax(0)

    @property
    def _mail(self) -> PointToPoint:
        return self.mail if self.mail is not None else self.host

    @property
    def _shared(self) -> Mail:
        if self.mail is None:
            raise RuntimeError(f"The {self.member}s can't look at each other's memory.")
        return self.mail

    @property
    def _both(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if self.groups is None:
            raise RuntimeError(f"There is one {self.member}: it has no process group to talk over.")
        return self.groups


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type each, as many as make a message; what is larger alone, uncopied."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        bucket = waiting.setdefault(tensor.dtype, [])
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET:
            yield waiting.pop(tensor.dtype)
            bucket = waiting.setdefault(tensor.dtype, [])
        bucket.append(tensor)
    yield from waiting.values()
