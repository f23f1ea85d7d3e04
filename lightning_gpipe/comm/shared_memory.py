"""Memory of this process that other processes of the machine can read."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_PAGE = 1 << 12
_KEPT = 1 << 26  # bytes that are kept for later where nothing is under way


class SharedMemory:
    """What this process has sent, until it is taken. Linux only.

    Nobody maps it: it is written and read like a file, and counts to no process's memory.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("lightning-gpipe")
        self._free: dict[int, list[int]] = {}  # places by size
        self._used: dict[int, int] = {}  # sizes by place
        self._end = 0

    @classmethod
    def make(cls) -> SharedMemory | None:
        """This process's; None where the system has none."""
        if sys.platform != "linux" or not hasattr(os, "eventfd"):
            return None
        with suppress(OSError):  # not allowed
            return cls()
        return None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the machine's memory."""
        return 512 * os.fstat(self.file).st_blocks

    def has_room(self, count: int) -> bool:
        """Whether so many bytes fit where others lay before."""
        return bool(self._free.get(_size_for(count)))

    def write(self, data: memoryview) -> int:
        """Write bytes; returns their place."""
        size = _size_for(data.nbytes)
        free = self._free.get(size)
        if free:
            place = free.pop()
        else:
            place, self._end = self._end, self._end + size
        self._used[place] = size
        done = os.pwrite(self.file, data, place)
        while done < data.nbytes:
            done += os.pwrite(self.file, data.cast("B")[done:], place + done)
        return place

    def give_back(self, place: int) -> None:
        """Let a place be used again."""
        self._free.setdefault(self._used.pop(place), []).append(place)
        if self._end > _KEPT and not self._used:
            os.ftruncate(self.file, 0)
            self._free, self._end = {}, 0

    def close(self) -> None:
        """Give it back to the system, as soon as nobody reads it any more."""
        os.close(self.file)


def read(file: int, place: int, into: memoryview) -> None:
    """Read bytes of another process's memory.

    Args:
        file: The memory.
        place: Where they lie.
        into: Where they go.
    """
    done = os.preadv(file, [into], place)
    while done < into.nbytes:
        more = os.preadv(file, [into.cast("B")[done:]], place + done)
        if not more:
            raise RuntimeError(f"{into.nbytes - done} bytes of a message are missing.")
        done += more


def _size_for(count: int) -> int:
    """The size of a place: a power of two, so that few sizes are kept; untouched pages are free."""
    return max(_PAGE, 1 << (count - 1).bit_length())
