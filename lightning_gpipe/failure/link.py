"""One connection between a rank and rank 0: lines of JSON."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from lightning_gpipe.comm.forks import keep_from_children

_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Link:
    """Sends and receives messages: a word, and values by name.

    Args:
        reader: The connection's.
        writer: The connection's.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        connection: socket.socket = writer.get_extra_info("socket")
        keep_from_children(connection)

    def keep_alive(self) -> None:
        """Let the system find out when the other machine is gone."""
        connection: socket.socket = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, word: str, **values: Any) -> None:
        """Send a message, unless the connection is closed."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps([word, values]).encode() + b"\n")

    async def receive(self) -> tuple[str, dict[str, Any]] | None:
        """The next message; None where the connection ends, or what came isn't one."""
        try:
            word, values = json.loads(await self._reader.readline())
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return (word, values) if isinstance(word, str) and isinstance(values, dict) else None

    async def messages(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The messages, until the connection ends."""
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Close the connection, once what was sent is gone."""
        self._writer.close()

    async def closed(self) -> None:
        """Wait until it is closed."""
        with suppress(OSError):  # however it came to its end
            await self._writer.wait_closed()
