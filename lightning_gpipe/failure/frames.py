"""Whose code runs: told by modules, which stay what they are wherever their files lie."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType

_PACKAGE, _, _ = __name__.partition(".")
DISTRIBUTED = ("torch.distributed",)
_LIBRARIES = (
    _PACKAGE,
    "torch",
    "lightning",
    "lightning_utilities",
    "torchmetrics",
    "contextlib",
    "threading",
)
#: Where Python's own modules lie, and those that are installed.
_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(map(sysconfig.get_path, _FOLDERS))


@contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """The innermost frame of every thread, while the block runs.

    The caller's frame is among them. Without an end the caller's variables would hold themselves,
    and what every other thread's functions hold, tensors above all, until Python collects garbage.
    """
    frames = sys._current_frames()
    try:
        yield frames
    finally:
        frames.clear()


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Whether a frame runs code of these packages."""
    module = str(frame.f_globals.get("__name__", ""))
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code of the user's."""
    return not is_of(frame, _LIBRARIES)


def place_of(thread: int) -> str:
    """A thread's place: the innermost line of the user's code, and what it called."""
    inner = ""
    with frames_of_threads() as threads:
        for frame in frames_of(threads.get(thread)):
            code = frame.f_code
            if not inner and not is_of(frame, DISTRIBUTED):
                inner = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            if is_users(frame):
                return f"{code.co_filename}:{frame.f_lineno} ({code.co_name}), in {inner}"
    return inner


def place_in(error: BaseException) -> str:
    """The innermost line of the user's own files that an exception came through; "": none."""
    for frame, line in reversed([*walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        is_own = os.path.isabs(file) and not file.startswith(_INSTALLED)  # compiled: not absolute
        if is_own and is_users(frame):
            return f"{file}:{line} ({frame.f_code.co_name})"
    return ""
