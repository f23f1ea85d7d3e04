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
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.forks import keep_from_children
from lightning_gpipe.comm.meeting import meet
from lightning_gpipe.comm.shared_memory import SharedMemory, read
from lightning_gpipe.comm.waiting import waiting

_HEAD = struct.Struct("<3q")  # key, bytes, and the place in the sender's memory, or:
_FOLLOWS = -1  # the message itself follows
_TAKEN = -2  # the message was taken whose place stands for its key
_SMALL = 1 << 12  # bytes up to which a message goes through the socket
_LOOK_S = 0.1  # how often a thread that sends what is left looks whether the run has ended
_LONGEST_S = 3600.0  # that the system sleeps at a time
#: Bytes from which on a process group is as good, and doesn't hold a message once more.
LARGE = 1 << 21


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Wait until it has arrived, or its memory may be changed."""


class PointToPoint(Protocol):
    """Messages between members of a group, as a process group has them."""

    def send(self, tensors: list[Tensor], member: int, tag: int, /) -> Work | None:
        """Send a tensor without waiting; None: there is nothing to wait for."""

    def recv(self, tensors: list[Tensor], member: int, tag: int, /) -> Work | None:
        """Receive a tensor without waiting; None: there is nothing to wait for."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A process that this one is connected to.

    Args:
        rank: Its global rank.
        connection: Where it sends.
        memory: Where its larger messages lie.
        posted: What waits for its messages, by their keys.
        early: The records of messages for which nothing waits yet, by their keys.
        unsent: What isn't sent yet.
        is_full: Whether the connection has no room, and a thread waits until it has.
        is_gone: Whether it has closed the connection.
    """

    rank: int
    connection: socket.socket
    memory: int
    posted: dict[int, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    early: dict[int, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    unsent: deque[bytes] = field(default_factory=deque)
    is_full: bool = False
    is_gone: bool = False


class Transfer:
    """A message that a process nearby hasn't taken yet, or that is expected from one."""

    __slots__ = ("_nearby", "into", "is_done", "peer")

    def __init__(self, nearby: Nearby, peer: _Peer, into: memoryview | None = None) -> None:
        self._nearby, self.peer, self.into, self.is_done = nearby, peer, into, False

    def wait(self) -> None:
        """Wait until it is taken."""
        if not self.is_done:
            self._nearby.wait_for(self)


class Nearby:
    """This process's connections to others of its machine.

    Args:
        rank: This process.
        gathers: For every group that it belongs to, what gathers an object of each member.
        timeout_s: How long a process waits for another before it gives up.
    """

    def __init__(
        self, rank: int, gathers: Sequence[Callable[[Any], Iterable[Any]]], timeout_s: float
    ) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._is_watched = False  # whether a thread sleeps until something arrives
        self._has_ended = False
        self._under_way: dict[int, Transfer] = {}  # by their places
        self._memory = SharedMemory.make() if gathers else None
        file = self._memory.file if self._memory is not None else None
        try:
            connected = meet(rank, gathers, file, timeout_s)
        except OSError as error:
            raise dist.DistBackendError(
                f"Rank {rank} has lost another one while they met: {error}."
            ) from error
        self._peers = {peer: _Peer(peer, *both) for peer, both in connected.items()}
        self._wake = os.eventfd(0) if self._memory is not None else -1
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            keep_from_children(peer.connection)

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
        view, peer, memory = _bytes_of(data), self._peers[rank], self._memory
        with self._lock:
            if view.nbytes <= _SMALL:
                self._write(peer, _HEAD.pack(key, view.nbytes, _FOLLOWS) + view.tobytes())
                return None
            if memory is None:
                raise RuntimeError("The connections are closed.")
            if not memory.has_room(view.nbytes) and not self._is_watched:
                for other in self._peers.values():
                    self._read(other)
            place = memory.write(view)
            transfer = self._under_way[place] = Transfer(self, peer)
            self._write(peer, _HEAD.pack(key, view.nbytes, place))
        return transfer

    def receive(self, rank: int, key: int, data: Tensor) -> Transfer:
        """Receive a message, without waiting for it.

        Args:
            rank: From whom.
            key: See :meth:`send`.
            data: Where it goes: contiguous, in host memory.
        """
        peer = self._peers[rank]
        transfer = Transfer(self, peer, _bytes_of(data))
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

    def _left_s(self, peer: _Peer, give_up: float) -> float:
        """How long a process may still be waited for."""
        if self._has_ended or peer.is_gone:
            raise dist.DistBackendError(
                f"Rank {self._rank} waits for rank {peer.rank}, which has left the run, or the run"
                " has failed."
            )
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            raise dist.DistBackendError(
                f"Rank {self._rank} has waited {self._timeout_s:.0f} s for rank {peer.rank}. If"
                " that takes so long, give GPipeStrategy a longer timeout."
            )
        return left_s

    def _all(self) -> tuple[select.poll, dict[int, _Peer]]:
        """What wakes who waits, and the connections among it."""
        poll, by_file = select.poll(), {}
        poll.register(self._wake, select.POLLIN)
        for peer in self._peers.values():
            if not peer.is_gone:
                by_file[peer.connection.fileno()] = peer
                poll.register(peer.connection, select.POLLIN)
        return poll, by_file

    def abort(self) -> None:
        """Let nobody wait any longer; for any thread."""
        with self._turn:
            self._has_ended = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            self._turn.notify_all()

    def close(self) -> None:
        """Close the connections: who waits for this process hears of it."""
        with self._turn:
            self.abort()
            for peer in self._peers.values():
                peer.connection.close()
                os.close(peer.memory)
            if self._memory is not None:
                self._memory.close()
                os.close(self._wake)
            self._peers, self._memory, self._wake = {}, None, -1

    def _read(self, peer: _Peer, until: Transfer | None = None) -> None:
        """Take what a process has sent, as far as something waits for it.

        Args:
            peer: The process.
            until: Read no further once this is taken; None: read all.
        """
        was_reset = False
        while not peer.is_gone and (until is None or not until.is_done):
            try:
                record = peer.connection.recv(_HEAD.size + _SMALL)
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

    def _handle(self, peer: _Peer, record: bytes) -> None:
        key, _, place = _HEAD.unpack_from(record)
        if place == _TAKEN:
            transfer = self._under_way.pop(key)
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
        (_, nbytes, place), into, peer = _HEAD.unpack_from(record), transfer.into, transfer.peer
        if into is None or into.nbytes != nbytes:
            raise RuntimeError(
                f"Rank {peer.rank} has sent {nbytes} bytes where rank {self._rank} expects"
                f" {into.nbytes if into is not None else 0}: the two do not run the same step."
            )
        if place == _FOLLOWS:
            into.cast("B")[:] = record[_HEAD.size :]
        else:
            read(peer.memory, place, into)
            self._write(peer, _HEAD.pack(place, 0, _TAKEN))
        transfer.is_done = True

    def _write(self, peer: _Peer, record: bytes) -> None:
        """Send a record; where the connection has no room, a thread waits until it has."""
        peer.unsent.append(record)
        if not peer.is_full and not self._write_rest(peer):
            peer.is_full = True
            threading.Thread(
                target=self._write_later, args=(peer,), name="gpipe-unsent", daemon=True
            ).start()

    def _write_rest(self, peer: _Peer) -> bool:
        """Send what isn't sent yet, as far as the connection has room; returns if that is all."""
        try:
            while peer.unsent:
                peer.connection.send(peer.unsent[0], socket.MSG_NOSIGNAL)
                peer.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError as error:  # what it has sent before can still be read
            peer.unsent.clear()
            if not isinstance(error, ConnectionError) and not self._has_ended:
                raise
        return True

    def _write_later(self, peer: _Peer) -> None:
        poll = select.poll()
        poll.register(peer.connection, select.POLLOUT)
        while not self._has_ended:
            poll.poll(1000 * _LOOK_S)
            with self._lock:
                if self._has_ended or self._write_rest(peer):
                    peer.is_full = False
                    return


@dataclass(frozen=True, slots=True)
class Mail:
    """Messages between members of a process group: through the machine's memory where it reaches.

    Args:
        group: The process group; for the other members, and for large messages.
        ranks: Global ranks of its members.
        nearby: The processes of this machine.
        number: Tells the group from others of this process.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    nearby: Nearby
    number: int

    def send(self, tensors: list[Tensor], member: int, tag: int) -> Work | None:
        """As :meth:`PointToPoint.send`."""
        rank = self.ranks[member]
        if rank in self.nearby and tensors[0].nbytes < LARGE:
            return self.nearby.send(rank, self._key(tag), tensors[0])
        return self.group.send(tensors, member, tag)

    def recv(self, tensors: list[Tensor], member: int, tag: int) -> Work:
        """As :meth:`PointToPoint.recv`."""
        rank = self.ranks[member]
        if rank in self.nearby and tensors[0].nbytes < LARGE:
            return self.nearby.receive(rank, self._key(tag), tensors[0])
        return self.group.recv(tensors, member, tag)

    def _key(self, tag: int) -> int:
        return self.number << 32 | tag


def _bytes_of(data: Tensor) -> memoryview:
    """A tensor's memory."""
    if not data.is_cpu or not data.is_contiguous():
        raise ValueError("a message is contiguous and in host memory")
    flat = data if data.dtype is torch.uint8 else data.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data
