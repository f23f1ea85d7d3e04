"""Whether a process waits for another, and where."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_gpipe import boundary

_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")
_WAITING = _DISTRIBUTED, boundary.__file__
_LIBRARIES = tuple(
    str(Path(module.__file__ or "").parent) for module in (torch, threading, boundary)
)


class Stall:
    """Tells how long the main thread has been waiting for other processes without doing anything.

    A thread that waits takes no processor time; one that makes progress does, however often it is
    seen in the same place. Where the system can't tell, nothing ever seems to wait.
    """

    def __init__(self) -> None:
        ident = threading.main_thread().ident
        clock_of: Any = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock_of(ident) if clock_of is not None else None
        self._worked = -1.0
        self._since = time.monotonic()

    def seconds(self) -> float:
        """For how long; 0 while the main thread works or waits for something else."""
        now = time.monotonic()
        worked = time.clock_gettime(self._clock) if self._clock is not None else now
        if worked != self._worked or not _waits(_frame()):
            self._worked, self._since = worked, now
        return now - self._since


def where() -> str:
    """The main thread's place: the innermost line of the user's code, and what it called."""
    frame: FrameType | None = _frame()
    inner = ""
    while frame is not None:
        name, code = frame.f_code.co_filename, frame.f_code
        if not inner and not name.startswith(_DISTRIBUTED):
            inner = f"{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"
        if not name.startswith(_LIBRARIES) and "lightning" not in Path(name).parts:
            return f"{name}:{frame.f_lineno} ({code.co_name}), in {inner}"
        frame = frame.f_back
    return inner


def _frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)
