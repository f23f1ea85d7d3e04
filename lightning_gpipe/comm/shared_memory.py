"""Memory of this process that other processes of the machine can read."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = mmap.ALLOCATIONGRANULARITY
_KEPT = 1 << 20  # bytes that are kept for later, or more where more is under way
_LONG = 1 << 26  # bytes of a file that begins anew where nothing is under way
_MOST_VIEWS = 64  # that a process has at a time: each is an open file


class SharedMemory:
    """What this process has sent, until it is taken. Linux only.

    It is written and read like a file, so it counts to no process's memory, but where others look
    at it (:class:`MemoryViews`).
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("lightning-gpipe")
        self._free: dict[int, list[int]] = {}  # places by size
        self._empty: dict[int, list[int]] = {}  # those that take no memory
        self._used: dict[int, int] = {}  # sizes by place
        self._end = self._under_way = self._kept = 0

    @classmethod
    def make(cls) -> SharedMemory | None:
        """This process's; None where the system has none, or limits it as a file."""
        if sys.platform != "linux" or not hasattr(os, "eventfd") or _limits_files():
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
        if self._free.get(size):
            place = self._free[size].pop()
            self._kept -= size
        elif self._empty.get(size):
            place = self._empty[size].pop()
        else:
            place = -(-self._end // _PAGE) * _PAGE
            self._end = place + size
            os.ftruncate(self.file, self._end)
        self._used[place] = size
        self._under_way += size
        done = os.pwrite(self.file, data, place)
        while done < data.nbytes:
            done += os.pwrite(self.file, data.cast("B")[done:], place + done)
        return place

    def give_back(self, place: int) -> None:
        """Let a place be used again, and clear others where too much is kept."""
        size = self._used.pop(place)
        self._under_way -= size
        self._kept += size
        self._free.setdefault(size, []).append(place)
        if not self._used and self._end > _LONG:
            os.ftruncate(self.file, 0)
            self._free, self._empty, self._end, self._kept = {}, {}, 0, 0
            return
        for other in sorted(self._free, reverse=True):
            places = self._free[other]
            while self._kept > max(_KEPT, self._under_way) and places and places[0] != place:
                self._clear(places.pop(0), other)

    def _clear(self, place: int, size: int) -> None:
        """Give a place's memory back to the system."""
        with mmap.mmap(self.file, size, offset=place) as pages:
            pages.madvise(mmap.MADV_REMOVE)
        self._kept -= size
        self._empty.setdefault(size, []).append(place)

    def close(self) -> None:
        """Give it back to the system, as soon as nobody reads it any more."""
        os.close(self.file)


class MemoryViews:
    """This process's looks at others' memory."""

    def __init__(self) -> None:
        self._count = 0
        #: Places that nobody looks at any more, and whose memory it is.
        self._left: deque[tuple[int, int]] = deque()

    def look(self, rank: int, file: int, place: int, count: int) -> Tensor:
        """Look at another process's memory without a copy.

        Args:
            rank: The other process.
            file: Its memory.
            place: Where the bytes lie. They must stay as they are.
            count: How many.

        Returns:
            The bytes, ``uint8``, of which pages are copied when they are changed; a copy of all
            where it would be one look too many.
        """
        self._count += 1
        if self._count <= _MOST_VIEWS:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            with suppress(OSError):  # as many files are open as may be
                pages = mmap.mmap(file, count, mmap.MAP_PRIVATE, access, offset=place)
                # who lets go of a tensor may hold any lock: so it is told later
                weakref.finalize(pages, self._left.append, (rank, place)).atexit = False
                return torch.frombuffer(pages, dtype=torch.uint8)
        copied = torch.empty(count, dtype=torch.uint8, device="cpu")
        read(file, place, copied.numpy().data)
        self._left.append((rank, place))
        return copied

    def left(self) -> Iterator[tuple[int, int]]:
        """Other processes, and places in their memory at which this one looks no more; once."""
        while self._left:
            self._count -= 1
            yield self._left.popleft()


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


def _limits_files() -> bool:
    """Whether files may only have a certain size, as after ``ulimit -f``."""
    import resource  # not everywhere

    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY


def _size_for(count: int) -> int:
    """The size of a place: one of four between two powers of two, so that few are kept."""
    step = max(_PAGE, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step
