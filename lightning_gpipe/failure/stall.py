"""Whether a process waits for another, and where."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_gpipe.comm import messages, p2p

_TORCH = Path(torch.__file__).parent
_DISTRIBUTED = str(_TORCH / "distributed")
_WAITING = _DISTRIBUTED, messages.__file__, p2p.__file__
_BACKWARD = str(_TORCH / "autograd" / "graph.py")
_OTHERS = {"lightning", "lightning_utilities", "torchmetrics"}
_LIBRARIES = tuple(
    str(Path(file or "").parent)
    for file in (torch.__file__, threading.__file__, Path(__file__).parent)
)


class Stall:
    """Tells how long a thread has been waiting for other processes without doing anything.

    A thread that waits takes no processor time; one that makes progress does, however often it is
    seen in the same place. Where the system can't tell, nothing ever seems to wait.

    Args:
        thread: Its identifier.
        waits_in_backward: Whether a backward that takes no processor time waits for a process: on
            CPUs, where it runs in the thread that calls it.
    """

    def __init__(self, thread: int, waits_in_backward: bool) -> None:
        self._thread = thread
        self._waiting = (*_WAITING, _BACKWARD) if waits_in_backward else _WAITING
        clock_of: Any = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock_of(thread) if clock_of is not None else None
        self._worked = -1.0
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long; 0 while the thread works or waits for something else."""
        now = time.monotonic()
        worked = time.clock_gettime(self._clock) if self._clock is not None else now
        frame = frame_of(self._thread)
        waits = frame is not None and frame.f_code.co_filename.startswith(self._waiting)
        if worked != self._worked or not waits:
            self._worked, self._since = worked, now
        return now - self._since


def frame_of(thread: int) -> FrameType | None:
    """What a thread runs."""
    return sys._current_frames().get(thread)


def place_of(thread: int) -> str:
    """A thread's place: the innermost line of the user's code, and what it called."""
    frame = frame_of(thread)
    inner = ""
    while frame is not None:
        name, code = frame.f_code.co_filename, frame.f_code
        if not inner and not name.startswith(_DISTRIBUTED):
            inner = getattr(code, "co_qualname", code.co_name)  # Python 3.11
        if not name.startswith(_LIBRARIES) and _OTHERS.isdisjoint(Path(name).parts):
            return f"{name}:{frame.f_lineno} ({code.co_name}), in {inner}"
        frame = frame.f_back
    return inner
