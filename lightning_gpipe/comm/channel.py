"""One direction between two ranks: over which groups bytes travel, and their tags."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from lightning_gpipe.comm.mail import PointToPoint, Work
from lightning_gpipe.comm.signature import TensorType

#: Message tags, as far as the backend knows tags.
HEADER, BESIDE, DATA, HOST = range(1, 5)
_TAGS = 8  # of each channel


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two neighbouring ranks.

    Args:
        peer: Global rank of the other end.
        peer_in_group: Its rank in the groups, which have the same members.
        headers: Over which headers and tensors in host memory go.
        data: Over which the bytes of tensors on the device go. Where these travel from device to
            device it is of this direction alone, so that neither direction can block the other.
        device: This rank's device.
        through_host: Whether ``data`` reaches host memory only.
        number: Tells it from other channels between the same ranks.
    """

    peer: int
    peer_in_group: int
    headers: PointToPoint
    data: PointToPoint
    device: torch.device
    through_host: bool
    number: int = 0

    def is_in_host(self, kind: TensorType) -> bool:
        """Whether a tensor's bytes travel through host memory."""
        return self.through_host or kind.device_type != self.device.type

    def lane(self, kind: TensorType) -> tuple[torch.device, PointToPoint, int]:
        """From and to where a tensor's bytes travel, over which group, with which tag."""
        if kind.device_type != self.device.type:
            return torch.device("cpu"), self.headers, HOST
        return torch.device("cpu") if self.through_host else self.device, self.data, DATA

    def echo_s(self, back: Channel, nbytes: int, times: int = 3) -> float:
        """Seconds that bytes take to the other end: half the way there and back, the middle time.

        Args:
            back: The channel from there; the other end runs :meth:`answer`.
            nbytes: How many.
            times: How often.
        """
        data = self._bytes(nbytes)
        found = []
        for _ in range(times):
            start = perf_counter()
            self._wait(self.send(data, self.data, DATA))
            self._wait(back.receive(data, back.data, DATA))
            found.append((perf_counter() - start) / 2)
        return statistics.median(found)

    def answer(self, back: Channel, nbytes: int, times: int = 3) -> None:
        """Send back what comes."""
        data = self._bytes(nbytes)
        for _ in range(times):
            self._wait(self.receive(data, self.data, DATA))
            self._wait(back.send(data, back.data, DATA))

    def _bytes(self, count: int) -> Tensor:
        device = torch.device("cpu") if self.through_host else self.device
        return torch.zeros(max(count, 1), dtype=torch.uint8, device=device)

    def _wait(self, work: Work | None) -> None:
        if work is not None:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # These do what dist.isend and dist.irecv do, whose checks take as long as the rest.

    def send(self, data: Tensor, group: PointToPoint, tag: int) -> Work | None:
        """Send bytes to the other end, without waiting; None: there are none."""
        tag += _TAGS * self.number
        return group.send([data], self.peer_in_group, tag) if data.numel() else None

    def receive(self, data: Tensor, group: PointToPoint, tag: int) -> Work | None:
        """Receive bytes from the other end, without waiting; None: there are none."""
        tag += _TAGS * self.number
        return group.recv([data], self.peer_in_group, tag) if data.numel() else None
