"""How processes of one machine find each other: by trying to reach each other's socket."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch.distributed as dist

#: A connection to another process, and its memory.
Connected: TypeAlias = tuple[socket.socket, int]
_HELLO_S = 5.0
_HELLO = struct.Struct("<q16s")  # who asks, and the secret of who is asked


def meet(
    rank: int,
    groups: Sequence[dist.ProcessGroup],
    memory: int | None,
    timeout_s: float,
) -> dict[int, Connected]:
    """Connect this process to others, as far as they are on this machine. Collective.

    Args:
        rank: This process.
        groups: All that it belongs to, in host memory.
        memory: This process's memory, which the others may read; None: it can't meet.
        timeout_s: How long a process waits for another before it gives up.

    Returns:
        The connections, by rank.

    Raises:
        OSError: If another process is gone meanwhile.
    """
    listener, secret = _listener() if memory is not None else None, secrets.token_bytes(16)
    own = (listener.getsockname(), secret) if listener is not None else None
    addresses = {r: a for group in groups for r, a in _of_all(group, (rank, own)) if r > rank and a}
    asked: dict[int, socket.socket] = {}
    if listener is not None and memory is not None:
        found = ((r, _ask(rank, memory, *a)) for r, a in addresses.items())
        asked = {r: connection for r, connection in found if connection is not None}
    askers = [each for group in groups for each in _of_all(group, (rank, [*asked]))]
    expected = {r for r, who in askers if rank in who}
    connected: dict[int, Connected] = {}
    if listener is not None and memory is not None:
        with listener:
            listener.settimeout(timeout_s)
            connected.update(_answers(listener, secret, memory, len(expected)))
    for other, connection in asked.items():
        connection.settimeout(timeout_s)
        _, files, *_ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionResetError(f"rank {other} is gone")
        connected[other] = connection, files[0]
    return connected


def _of_all(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every member's object. Collective; the group is new, so that nothing else is under way."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def _listener() -> socket.socket | None:
    """Where others can ask for a connection; None: the system doesn't allow it."""
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # a name that is no file's, and that no other machine has
        listener.bind(f"\0lightning-gpipe-{secrets.token_hex(16)}")
        listener.listen(1024)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _ask(rank: int, memory: int, address: bytes, secret: bytes) -> socket.socket | None:
    """Ask another process for a connection; None: it isn't on this machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        socket.send_fds(connection, [_HELLO.pack(rank, secret)], [memory])
    except OSError:
        connection.close()
        return None
    return connection


def _answers(
    listener: socket.socket, secret: bytes, memory: int, count: int
) -> Iterator[tuple[int, Connected]]:
    """Answer those that have asked, as many as there are; strangers aren't counted."""
    while count:
        connection, _ = listener.accept()
        connection.settimeout(_HELLO_S)  # who has asked said so before it told the others
        hello, files = b"", list[int]()
        with suppress(OSError):
            hello, files, *_ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(hello) == _HELLO.size and len(files) == 1:
            rank, said = _HELLO.unpack(hello)
            if hmac.compare_digest(said, secret):
                socket.send_fds(connection, [b"\0"], [memory])
                count -= 1
                yield rank, (connection, files[0])
                continue
        for file in files:
            os.close(file)
        connection.close()
