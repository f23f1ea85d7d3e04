"""Whether a process waits for another, and where."""

from __future__ import annotations

import time
from types import FrameType
from typing import Any

from lightning_gpipe.comm import messages
from lightning_gpipe.failure.frames import DISTRIBUTED, frames_of, frames_of_threads, is_of

_WAITING = (*DISTRIBUTED, messages.__name__.rpartition(".")[0])  # the room of messages, comm
_BACKWARD = ("torch.autograd",)


class Stall:
    """Tells how long a thread has been waiting for other processes without doing anything.

    A thread that waits takes no processor time; one that makes progress does, however often it is
    seen in the same place. Where the system can't tell, nothing ever seems to wait. A backward may
    run in another thread, autograd's on GPUs: then that one must be idle, too.

    Args:
        thread: Its identifier.
        waits_in_backward: Whether a backward that takes no processor time waits for a process: on
            CPUs, where it runs in the thread that calls it.
    """

    def __init__(self, thread: int, waits_in_backward: bool) -> None:
        self._thread = thread
        self._waiting = (*_WAITING, *_BACKWARD) if waits_in_backward else _WAITING
        self._clock_of: Any = getattr(time, "pthread_getcpuclockid", None)
        self._worked: dict[int, float] = {}
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long; 0 while the thread works or waits for something else."""
        now = time.monotonic()
        worked = {thread: self._processor_time(thread, now) for thread in self._idle_threads()}
        if not worked or worked != self._worked:
            self._worked, self._since = worked, now
        return now - self._since

    def _idle_threads(self) -> list[int]:
        """The thread, and those whose backward it may wait for; none if nobody waits for a rank."""
        with frames_of_threads() as frames:
            if self._thread not in frames:
                return []
            backwards = [
                thread
                for thread, frame in frames.items()
                if thread != self._thread and is_of(frame, _WAITING) and _runs_backward(frame)
            ]
            waits = bool(backwards) or is_of(frames[self._thread], self._waiting)
            return [self._thread, *backwards] if waits else []

    def _processor_time(self, thread: int, now: float) -> float:
        return time.clock_gettime(self._clock_of(thread)) if self._clock_of is not None else now


def _runs_backward(frame: FrameType) -> bool:
    return any(is_of(outer, _BACKWARD) for outer in frames_of(frame))
