"""One clock for all ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import ObjectChannel

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PINGS = 9


def machine() -> str:
    """Tells this machine from others: processes of one share its monotonic clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class SharedClock:
    """Tells how far ``time.perf_counter`` of this rank is behind that of rank 0.

    Ranks of one machine have one clock. Those of others ask the first stage, and the first stage
    that of the first replica: of several questions the one that was answered soonest counts, and
    the answer is taken for the middle of the time between.

    Args:
        groups: The process groups.
        here: This machine.
        clock: This rank's.
    """

    def __init__(
        self,
        groups: Groups,
        here: str | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._groups, self._here, self._clock = groups, here or machine(), clock
        self._machines: tuple[list[str], list[str]] | None = None

    def offset_s(self) -> float:
        """Seconds to add to this rank's clock. Collective over all ranks.

        Clocks drift: measure it anew after some minutes.
        """
        pipeline, siblings = self._groups.pipeline, self._groups.siblings
        if self._machines is None:
            self._machines = (
                pipeline.gather("clock", self._here),
                siblings.gather("clock", self._here),
            )
        of_pipeline, of_siblings = self._machines
        own = self._behind_first(pipeline, of_pipeline)
        across = self._behind_first(siblings, of_siblings)
        if siblings.is_alone:
            return own
        return own + float(pipeline.gather("clock", across)[0])

    def _behind_first(self, channel: ObjectChannel, machines: list[str]) -> float:
        """Seconds to add for the clock of a channel's first member. Collective over it."""
        found = 0.0
        for member in range(1, len(machines)):
            if machines[member] == machines[0]:
                continue
            if channel.index == 0:
                for _ in range(_PINGS):
                    self._receive(channel, member)
                    self._send(channel, member)
            elif channel.index == member:
                found = min(self._ask(channel) for _ in range(_PINGS))[1]
        return found

    def _ask(self, channel: ObjectChannel) -> tuple[float, float]:
        """Seconds that a question took, and how far this clock is behind."""
        start = self._clock()
        self._send(channel, 0)
        there, end = self._receive(channel, 0), self._clock()
        return end - start, there - (start + end) / 2

    def _send(self, channel: ObjectChannel, member: int) -> None:
        now = torch.tensor([self._clock()], dtype=torch.float64, device="cpu")
        work = channel.post(now.view(torch.uint8), member)
        if work is not None:
            work.wait()

    def _receive(self, channel: ObjectChannel, member: int) -> float:
        data = torch.empty(8, dtype=torch.uint8, device="cpu")
        return float(channel.await_from(member, data).view(torch.float64))
