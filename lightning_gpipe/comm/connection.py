"""What a process keeps of another one of its machine that it is connected to."""

from __future__ import annotations

import select
import socket
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T")
_LOOK_S = 0.1  # how often a thread that sends what is left looks whether the run has ended


@dataclass(slots=True, eq=False)
class Connection(Generic[_T]):
    """A process that this one is connected to.

    Args:
        rank: Its global rank.
        link: Where it sends.
        memory: Where its larger messages lie.
        lock: Held by who reads or writes.
        posted: What waits for its messages, by their keys.
        early: The records of messages for which nothing waits yet, by their keys.
        unsent: What isn't sent yet.
        is_full: Whether the connection has no room, and a thread waits until it has.
        is_gone: Whether it has closed the connection.
        has_ended: Whether the run has.
    """

    rank: int
    link: socket.socket
    memory: int
    lock: threading.RLock
    posted: dict[int, deque[_T]] = field(default_factory=lambda: defaultdict(deque))
    early: dict[int, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    unsent: deque[bytes] = field(default_factory=deque)
    is_full: bool = False
    is_gone: bool = False
    has_ended: bool = False

    def write(self, record: bytes) -> None:
        """Send a record; where the connection has no room, a thread waits until it has."""
        self.unsent.append(record)
        if not self.is_full and not self._write_rest():
            self.is_full = True
            threading.Thread(target=self._write_later, name="gpipe-unsent", daemon=True).start()

    def _write_rest(self) -> bool:
        """Send what isn't sent yet, as far as the connection has room; returns if that is all."""
        try:
            while self.unsent:
                self.link.send(self.unsent[0], socket.MSG_NOSIGNAL)
                self.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError as error:  # what it has sent before can still be read
            self.unsent.clear()
            if not isinstance(error, ConnectionError) and not self.has_ended:
                raise
        return True

    def _write_later(self) -> None:
        poll = select.poll()
        poll.register(self.link, select.POLLOUT)
        while not self.has_ended:
            poll.poll(1000 * _LOOK_S)
            with self.lock:
                if self.has_ended or self._write_rest():
                    self.is_full = False
                    return
