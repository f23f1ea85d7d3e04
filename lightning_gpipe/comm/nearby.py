"""Messages between processes of one machine, without the network and its threads.

A message of a few kilobytes goes through a Unix socket; a larger one is written to memory of the
sender's, and its place goes through the socket. The receiver copies it to where it belongs when it
waits, for it or for another message. gloo, made for networks, has threads on both sides that wake
each other at every message, beside layers that compute on the same cores.

Nothing is taken while a process computes, so who sends much must wait for the receiver from time to
time. Where a connection is full, a thread sends the rest.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.connection import Connection
from lightning_gpipe.comm.forks import keep_from_children
from lightning_gpipe.comm.meeting import meet
from lightning_gpipe.comm.shared_memory import MemoryViews, SharedMemory, read
from lightning_gpipe.comm.waiting import waiting

_HEAD = struct.Struct("<3q")  # key, bytes, and the place in the sender's memory, or:
_FOLLOWS = -1  # the message itself follows
_TAKEN = -2  # the message was taken whose place stands for its key
_SMALL = 1 << 12  # bytes up to which a message goes through the socket
_LONGEST_S = 3600.0  # that the system sleeps at a time


class Transfer:
    """A message that processes nearby haven't taken yet, or that is expected from one.

    Args:
        nearby: This process's connections.
        peer: The other process, or one of those that take it.
        into: Where what is expected goes; None: it is looked at where it lies.
        count: Its bytes, or the processes that haven't taken it.
    """

    __slots__ = ("_nearby", "count", "into", "is_done", "peer", "view")

    def __init__(
        self,
        nearby: Nearby,
        peer: Connection[Transfer],
        into: memoryview | None = None,
        count: int = 1,
    ) -> None:
        self._nearby, self.peer, self.into, self.count = nearby, peer, into, count
        self.is_done = False
        self.view: Tensor | None = None

    def wait(self) -> None:
        """Wait until it is taken."""
        if not self.is_done:
            self._nearby.wait_for(self)


class Nearby:
    """This process's connections to others of its machine.

    Args:
        rank: This process.
        groups: All that it belongs to, in host memory.
        timeout_s: How long a process waits for another before it gives up.
    """

    def __init__(self, rank: int, groups: Sequence[dist.ProcessGroup], timeout_s: float) -> None:
        self.rank, self._timeout_s = rank, timeout_s
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._is_watched = False  # whether a thread sleeps until something arrives
        self._has_ended = False
        self._under_way: dict[int, Transfer] = {}  # by their places
        self._views = MemoryViews()
        self._memory = SharedMemory.make() if groups else None
        try:
            file = self._memory.file if self._memory is not None else None
            connected = meet(rank, groups, file, timeout_s)
        except OSError as error:
            raise dist.DistBackendError(
                f"Rank {rank} has lost another one while they met: {error}."
            ) from error
        self._peers: dict[int, Connection[Transfer]] = {
            peer: Connection(peer, *both, self._lock) for peer, both in connected.items()
        }
        self._wake = os.eventfd(0) if self._memory is not None else -1
        for peer in self._peers.values():
            peer.link.setblocking(False)
            keep_from_children(peer.link)

    def __contains__(self, rank: int) -> bool:
        """Whether a process is nearby."""
        return rank in self._peers

    @property
    def nbytes(self) -> int:
        """Bytes that messages under way take, outside of any process's own memory."""
        return self._memory.nbytes if self._memory is not None else 0

    def send(self, rank: int, key: int, data: Tensor) -> Transfer | None:
        """Send a message; its memory may be changed at once.

        Args:
            rank: To whom.
            key: Tells it from others between the two.
            data: Contiguous, in host memory.

        Returns:
            The message, if it can be waited for.
        """
        if data.nbytes > _SMALL:
            return self.share([rank], key, data)
        with self._lock:
            self._tell_left()
            own = _bytes_of(data).tobytes()
            self._peers[rank].write(_HEAD.pack(key, len(own), _FOLLOWS) + own)
        return None

    def share(self, ranks: Sequence[int], key: int, data: Tensor) -> Transfer:
        """Send a message of more than 4 KiB to several; see :meth:`send`."""
        own, peers = _bytes_of(data), [self._peers[rank] for rank in ranks]
        with self._lock:
            if self._memory is None:
                raise RuntimeError("The connections are closed.")
            self._tell_left()
            if not self._memory.has_room(own.nbytes) and not self._is_watched:
                for other in self._peers.values():
                    self._read(other)
            place = self._memory.write(own)
            transfer = self._under_way[place] = Transfer(self, peers[0], count=len(peers))
            for peer in peers:
                peer.write(_HEAD.pack(key, own.nbytes, place))
        return transfer

    def receive(self, rank: int, key: int, data: Tensor) -> Transfer:
        """Receive a message, without waiting for it.

        Args:
            rank: From whom.
            key: See :meth:`send`.
            data: Where it goes: contiguous, in host memory.
        """
        return self._expect(rank, key, _bytes_of(data))

    def look_at(self, rank: int, key: int, count: int) -> Tensor:
        """Look at so many bytes where they lie; to change them changes nobody else's."""
        transfer = self._expect(rank, key, None, count)
        transfer.wait()
        return cast(Tensor, transfer.view)

    def _expect(self, rank: int, key: int, into: memoryview | None, count: int = 0) -> Transfer:
        peer = self._peers[rank]
        transfer = Transfer(self, peer, into, count if into is None else into.nbytes)
        with self._lock:
            early = peer.early.get(key)
            if early:
                self._take(transfer, early.popleft())
            else:
                peer.posted[key].append(transfer)
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Wait until a message is taken.

        Raises:
            DistBackendError: If the other process has left the run, or doesn't come.
        """
        peer, give_up = transfer.peer, time.monotonic() + self._timeout_s
        while True:
            with self._turn:
                if not self._is_watched:
                    self._read(peer, until=transfer)
                if transfer.is_done:
                    return
                left_s = min(self._left_s(peer, give_up), _LONGEST_S)
                if self._is_watched:  # by another thread, which takes what arrives
                    with waiting:
                        self._turn.wait(left_s)
                    continue
                self._is_watched = True
                poll, by_file = self._all()
            files: list[tuple[int, int]] = []
            try:
                with waiting:
                    files = poll.poll(1000 * left_s)
            finally:
                with self._turn:
                    self._is_watched = False
                    self._turn.notify_all()
                    for file, _ in files:
                        if file in by_file and not self._has_ended:
                            self._read(by_file[file])

    def _left_s(self, peer: Connection[Transfer], give_up: float) -> float:
        """How long a process may still be waited for."""
        if self._has_ended or peer.is_gone:
            raise dist.DistBackendError(
                f"Rank {self.rank} waits for rank {peer.rank}, which has left the run, or the run"
                " has failed."
            )
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            raise dist.DistBackendError(
                f"Rank {self.rank} has waited {self._timeout_s:.0f} s for rank {peer.rank}. If"
                " that takes so long, give GPipeStrategy a longer timeout."
            )
        return left_s

    def _all(self) -> tuple[select.poll, dict[int, Connection[Transfer]]]:
        """What wakes who waits, and the connections among it."""
        poll, by_file = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for peer in self._peers.values():
            if not peer.is_gone:
                by_file[peer.link.fileno()] = peer
                poll.register(peer.link, select.POLLIN)
        return poll, by_file

    def abort(self) -> None:
        """Let nobody wait any longer; for any thread."""
        with self._turn:
            self._has_ended = True
            for peer in self._peers.values():
                peer.has_ended = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._turn.notify_all()

    def close(self) -> None:
        """Close the connections: who waits for this process hears of it."""
        with self._turn:
            self.abort()
            for peer in self._peers.values():
                peer.link.close()
                os.close(peer.memory)
            if self._memory is not None:
                self._memory.close()
                os.close(self._wake)
            self._peers, self._memory, self._wake = {}, None, -1

    def _read(self, peer: Connection[Transfer], until: Transfer | None = None) -> None:
        """Take what a process has sent, as far as something waits for it.

        Args:
            peer: The process.
            until: Read no further once this is taken; None: read all.
        """
        was_reset = False
        while not peer.is_gone and (until is None or not until.is_done):
            try:
                record = peer.link.recv(_HEAD.size + _SMALL)
            except BlockingIOError:
                return
            except OSError:  # it is told once; what was sent before comes after it
                record = b""
                if not was_reset:
                    was_reset = True
                    continue
            if record:
                self._handle(peer, record)
            else:
                peer.is_gone = True

    def _handle(self, peer: Connection[Transfer], record: bytes) -> None:
        key, _, place = _HEAD.unpack_from(record)
        if place == _TAKEN:
            transfer = self._under_way[key]
            transfer.count -= 1
            if not transfer.count:
                del self._under_way[key]
                transfer.is_done = True
                if self._memory is not None:
                    self._memory.give_back(key)
            return
        posted = peer.posted.get(key)
        if posted:
            self._take(posted.popleft(), record)
        else:
            peer.early[key].append(record)

    def _take(self, transfer: Transfer, record: bytes) -> None:
        """Copy a message to where it belongs."""
        (_, count, place), into, peer = _HEAD.unpack_from(record), transfer.into, transfer.peer
        if transfer.count != count:
            raise RuntimeError(
                f"Rank {peer.rank} has sent {count} bytes where rank {self.rank} expects"
                f" {transfer.count}: the two do not run the same step."
            )
        if into is None:
            transfer.view = self._views.look(peer.rank, peer.memory, place, count)
            self._tell_left()
        elif place == _FOLLOWS:
            into.cast("B")[:] = record[_HEAD.size :]
        else:
            read(peer.memory, place, into)
            peer.write(_HEAD.pack(place, 0, _TAKEN))
        transfer.is_done = True

    def _tell_left(self) -> None:
        """Tell the others that their memory isn't looked at any more."""
        for rank, place in self._views.left():
            if rank in self._peers:
                self._peers[rank].write(_HEAD.pack(place, 0, _TAKEN))


def _bytes_of(data: Tensor) -> memoryview:
    """A tensor's memory."""
    if not data.is_cpu or not data.is_contiguous():
        raise ValueError("a message is contiguous and in host memory")
    flat = data if data.dtype is torch.uint8 else data.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data
