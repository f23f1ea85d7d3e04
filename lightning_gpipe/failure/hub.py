"""Rank 0's side: which of several failures came first, told to every rank."""

from __future__ import annotations

import asyncio
import hmac
import socket
from contextlib import suppress
from dataclasses import asdict

from lightning_gpipe.comm.forks import keep_from_children
from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.link import Link
from lightning_gpipe.failure.reason import DIED, NO_RANK, Failure

_STRANGERS = 16  # connections at a time that haven't said who they are, besides the ranks'
_RETRY_S = 1.0


class Hub:
    """Collects what ranks tell, and decides. Every rank, rank 0 too, has one connection to it.

    Runs in one event loop, as all its methods do.

    Args:
        server: Where ranks connect.
        token: What they say to be let in.
        stages: K.
        world_size: The number of processes.
        deadlines: How long what is waited for.
    """

    def __init__(
        self,
        server: socket.socket,
        token: str,
        stages: int,
        world_size: int,
        deadlines: Deadlines,
    ) -> None:
        self._socket, self._token = server, token
        self._stages, self._world_size, self._deadlines = stages, world_size, deadlines
        self._links: dict[int, Link] = {}
        self._strangers: dict[Link, None] = {}
        self._verdict: Failure | None = None
        self._candidates: list[Failure] = []
        self._told: set[int] = set()
        self._through: set[int] = set()
        self._stalled: dict[int, str] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def open(self) -> None:
        """Accept connections."""
        keep_from_children(self._socket)
        self._socket.setblocking(False)
        self._listen()

    async def close(self) -> None:
        """End all connections, once everything said has gone out."""
        self._is_closing = True
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for link in (*self._links.values(), *self._strangers):
            link.send("bye")
            link.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=self._deadlines.grace_s)

    def _listen(self) -> None:
        if not self._is_closing:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept a connection, and hear it in a task that the end waits for."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it is gone again, or this process may open no more files: not at once
            loop.remove_reader(self._socket)
            loop.call_later(_RETRY_S, self._listen)
            return
        task = loop.create_task(self._serve(connection))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        link = Link(*await asyncio.open_connection(sock=connection))
        rank = None if self._is_closing else await self._identify(link)
        if rank is not None:
            await self._hear(rank, link)
        link.close()
        await link.closed()

    async def _hear(self, rank: int, link: Link) -> None:
        """Hear what a rank says until its connection ends."""
        link.keep_alive()
        self._links[rank] = link
        if self._verdict is not None:
            link.send("verdict", **asdict(self._verdict))
        async for word, values in link.messages():
            if word == "failed":
                self._suspect(Failure(**values))
            elif word == "told":
                self._count(rank)
            elif word == "stalled":
                self._note_stall(rank, values["where"])
            elif word == "through":
                self._note_through(rank)
            elif word == "bye":
                break
        else:
            self._suspect(Failure(rank, rank % self._stages, DIED, "died"))
        self._links.pop(rank, None)
        self._count(rank)

    async def _identify(self, link: Link) -> int | None:
        """The rank of a new connection; None if it isn't one of ours, or doesn't say so in time."""
        if len(self._strangers) >= self._world_size + _STRANGERS:
            oldest = next(iter(self._strangers))  # who means us well doesn't take long
            del self._strangers[oldest]
            oldest.close()
        self._strangers[link] = None
        message = None
        with suppress(asyncio.TimeoutError):
            message = await asyncio.wait_for(link.receive(), self._deadlines.hello_s)
        self._strangers.pop(link, None)
        word, values = message or ("", {})
        token, rank = values.get("token"), values.get("rank")
        knows = isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())
        return rank if word == "hello" and knows and isinstance(rank, int) else None

    def _note_stall(self, rank: int, place: str) -> None:
        """Note where a rank waits; nowhere: it goes on."""
        self._stalled.pop(rank, None)
        if place:
            self._stalled[rank] = place
        if len(self._stalled) == self._world_size:
            waits = "; ".join(f"rank {r} at {self._stalled[r]}" for r in sorted(self._stalled))
            text = (
                "All ranks have been waiting for each other for"
                f" {self._deadlines.stall_s:.0f} s, so they don't run the same step."
                " Call the model, the Trainer and collectives on every rank alike, never under `if"
                " rank == 0`, and give all replicas the same number of batches. Collectives of"
                " torch.distributed in a layer, or in a backward of one's own, run on the stages"
                " that have it alone: gather with self.all_gather(x, sync_grads=True). Now"
                f" {waits}."
            )
            self._suspect(Failure(NO_RANK, NO_RANK, text, "stall"))

    def _note_through(self, rank: int) -> None:
        """Note who is through with the run; when all are, they may go."""
        self._through.add(rank)
        if len(self._through) == self._world_size and not self._candidates:
            for link in self._links.values():
                link.send("all through")
        else:
            self._note_stall(rank, "the end of its run")

    def _suspect(self, failure: Failure) -> None:
        """Collect what arrives together."""
        if not self._candidates:
            asyncio.get_running_loop().call_later(self._deadlines.event_s, self._decide)
        self._candidates.append(failure)

    def _decide(self) -> None:
        """Choose the first error, and tell it to all."""
        if len(self._stalled) < self._world_size:  # a rank went on after all
            self._candidates = [f for f in self._candidates if f.kind != "stall"]
        if not self._candidates:
            return
        self._verdict = verdict = min(self._candidates, key=lambda failure: failure.order)
        for link in self._links.values():
            link.send("verdict", **asdict(verdict))

    def _count(self, rank: int) -> None:
        """Count who knows; when all do, whoever reported may go on and end."""
        self._told.add(rank)
        if self._verdict is not None and self._told.issuperset(self._links):
            for link in self._links.values():
                link.send("all told")
