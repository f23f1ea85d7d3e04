"""A rank's side: its connection to rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeAlias

from lightning_gpipe.failure.link import Link
from lightning_gpipe.failure.reason import DIED, Failure

Address: TypeAlias = tuple[str, int, str]  # host, port, token


class Member:
    """Tells rank 0 what happens here, and hears its verdict.

    Runs in one event loop, as all its methods do.

    Args:
        rank: This process.
        address: Where rank 0 listens, and what it wants to be told.
        learn: Called with the run's failure.
        say: Prints a line.
    """

    def __init__(
        self,
        rank: int,
        address: Address,
        learn: Callable[[Failure], None],
        say: Callable[[str], None],
    ) -> None:
        self._rank, self._address = rank, address
        self._learn, self._say = learn, say
        self._link: Link | None = None
        self._connected, self.all_told = asyncio.Event(), asyncio.Event()
        self.ended = asyncio.Event()  # all ranks are through, or the run has failed

    async def listen(self) -> None:
        """Connect, and hear what rank 0 says."""
        host, port, token = self._address
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            self._say(
                f"Rank 0 can't be reached at {host}:{port} ({error}): errors of other ranks are"
                " noticed late."
            )
            return
        self._link = Link(reader, writer)
        self._link.keep_alive()
        self._link.send("hello", rank=self._rank, token=token)
        self._connected.set()
        async for word, values in self._link.messages():
            if word == "verdict":
                self._learn(Failure(**values))
                self._link.send("told")
                self.ended.set()
            elif word == "all told":
                self.all_told.set()
            elif word == "all through":
                self.ended.set()
            elif word == "bye":
                break
        else:
            self._learn(Failure(0, 0, DIED, "died"))
        self.all_told.set()
        self.ended.set()

    async def report(self, failure: Failure) -> None:
        """Tell of a failure here, and wait until all ranks know."""
        await self._connected.wait()
        self.tell(failure)
        await self.all_told.wait()

    async def finish(self) -> None:
        """Tell that this rank is through, and wait until all are, or one has failed."""
        if self._link is not None:
            self._link.send("through")
            await self.ended.wait()

    def tell(self, failure: Failure) -> None:
        """Tell of a failure here."""
        if self._link is not None:
            self._link.send("failed", **asdict(failure))

    def tell_stall(self, place: str) -> None:
        """Tell where the main thread waits; nowhere: it goes on."""
        if self._link is not None:
            self._link.send("stalled", where=place)

    async def close(self) -> None:
        """End the connection, and all that waits for it."""
        for event in (self._connected, self.all_told, self.ended):
            event.set()
        if self._link is not None:
            self._link.send("bye")
            self._link.close()
            await self._link.closed()
