"""One error ends all processes, and every one of them says which error it was.

A thread of each process holds a connection to rank 0's, which decides. It hears of an error from
the process that failed, and of a killed process by its connection, which the system closes with it.
What arrives within half a second counts as one event: a lost connection of the pipeline is taken
for the consequence of another error, if there is one. The first error goes to every process, which
prints it, aborts its process groups, and ends if its main thread, blocked in who knows what, does
not do so by itself. ::

    rank 2: ValueError ──report──> rank 0 ──verdict──> ranks 1, 2, 3: print, abort, end
    rank 3: killed     ──  end  ──>

If rank 0 goes, the connections to it end, and that is the verdict. If all ranks do nothing but wait
for each other for two minutes, they don't run the same step, and that is a failure, too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lightning_gpipe.failure.forks import keep_from_children
from lightning_gpipe.failure.stall import Stall, frame_of, place_of
from lightning_gpipe.failure.verdict import DIED, NO_RANK, ORPHAN, Failure

EVENT_S = 0.5  # an error and its consequences arrive within this time
GRACE_S = 5.0  # for a main thread to hear of the error
CLEANUP_S = 60.0  # for its callbacks and loggers to end then
EXIT_S = 10.0  # for the process to end after its main thread has
STALL_S = 120.0  # for which all ranks must wait, and none work, to be taken for stuck
_TICK_S = 1.0
_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Watchdog:
    """This process's thread.

    Args:
        rank: This process.
        stages: K; ranks of a pipeline are adjacent.
        world_size: The number of processes.
        host: Where rank 0 can be reached.
        broadcast: Gives all processes rank 0's value; called once, in the constructor.
        abort: Called when the run has failed: ends what the main thread waits for, as far as that
            is possible.
        on_cpu: Whether the layers run on the CPU.
    """

    def __init__(
        self,
        rank: int,
        stages: int,
        world_size: int,
        host: str,
        broadcast: Callable[[Any], Any],
        abort: Callable[[], None],
        on_cpu: bool,
    ) -> None:
        self.failure: Failure | None = None
        self._rank, self._stages, self._world_size = rank, stages, world_size
        self._abort = abort
        self._main = threading.get_ident()
        self._stall = Stall(self._main, on_cpu)
        self._candidates: list[Failure] = []
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._told: set[int] = set()
        self._stalled: dict[int, str] = {}
        self._exit: asyncio.TimerHandle | None = None
        server, address = None, None
        if rank == 0:
            family = socket.getaddrinfo(host, None)[0][0]
            server = socket.create_server(("", 0), family=family, backlog=world_size)
            address = host, server.getsockname()[1], secrets.token_hex(16)
        self._host, self._port, self._token = broadcast(address)
        self._loop = asyncio.new_event_loop()
        self._connected = asyncio.Event()
        self._closing, self._all_told = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._watch(server),),
            name="gpipe-watchdog",
            daemon=True,
        )
        self._thread.start()

    # ------------------------------------------------------------------ the main thread's side

    def report(self, error: BaseException) -> Failure:
        """Tell all processes of an error, and wait until they know.

        Returns:
            The first failure of the run, which may be another process's.
        """
        own = Failure.of(error, self._rank, self._stages)
        # too late: the thread is gone, or who should answer is
        with suppress(RuntimeError, FutureTimeoutError):
            asyncio.run_coroutine_threadsafe(self._report(own), self._loop).result(GRACE_S)
        return self.failure or own

    def close(self) -> None:
        """End the thread: this process's part of the run is over."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()
        if self.failure is not None:  # what is left of the process groups may block the exit
            threading.Thread(target=_bound_exit, name="gpipe-exit", daemon=True).start()

    # ------------------------------------------------------------------ the thread

    async def _watch(self, server: socket.socket | None) -> None:
        if server is not None:
            keep_from_children(server)
            hub = await asyncio.start_server(self._serve, sock=server)
        else:
            hub = None
            connected = asyncio.create_task(self._listen())
        watching = asyncio.create_task(self._watch_main_thread())
        await self._closing.wait()
        watching.cancel()
        if self._exit is not None:
            self._exit.cancel()
        for writer in self._writers.values():
            _send(writer, "bye")
            writer.close()
        await asyncio.gather(
            *(w.wait_closed() for w in self._writers.values()), return_exceptions=True
        )
        if hub is not None:
            hub.close()
        else:
            connected.cancel()

    async def _watch_main_thread(self) -> None:
        """Tell rank 0 when the main thread does nothing but wait, and when it goes on."""
        place = ""
        while True:
            await asyncio.sleep(_TICK_S)
            launcher = multiprocessing.parent_process()
            if launcher is not None and not launcher.is_alive():
                self._tell(Failure(self._rank, self._rank % self._stages, ORPHAN))
            stalls = self._stall.seconds() >= STALL_S
            was, place = place, place_of(self._main) if stalls else ""
            if bool(was) == bool(place):
                continue
            if self._rank == 0:
                self._note_stall(0, place)
            elif self._connected.is_set():
                _send(self._writers[0], "stalled", where=place)

    async def _listen(self) -> None:
        """Listen to rank 0."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            self._say(
                f"Rank 0 can't be reached at {self._host}:{self._port} ({error}): errors of other"
                " ranks are noticed late."
            )
            return
        self._writers[0] = writer
        _keep_alive(writer)
        _send(writer, "hello", rank=self._rank, token=self._token)
        self._connected.set()
        async for what, value in _messages(reader):
            if what == "verdict":
                self._learn(Failure(**value))
                _send(writer, "told")
            elif what == "all told":
                self._all_told.set()
            elif what == "bye":
                return
        self._learn(Failure(0, 0, DIED))
        self._all_told.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to another rank, on rank 0."""
        messages = _messages(reader)
        rank = await self._identify(messages)
        if rank is None:
            writer.close()
            return
        self._writers[rank] = writer
        _keep_alive(writer)
        if self.failure is not None:
            _send(writer, "verdict", **asdict(self.failure))
        async for what, value in messages:
            if what == "failed":
                self._suspect(Failure(**value))
            elif what == "told":
                self._count(rank)
            elif what == "stalled":
                self._note_stall(rank, value["where"])
            elif what == "bye":
                break
        else:
            self._suspect(Failure(rank, rank % self._stages, DIED))
        self._writers.pop(rank, None)
        self._count(rank)

    async def _identify(self, messages: AsyncIterator[Any]) -> int | None:
        """The rank of a new connection; None if it isn't one of ours."""
        with suppress(ValueError, KeyError, TypeError):
            async for what, value in messages:
                ours = what == "hello" and value["token"] == self._token
                return int(value["rank"]) if ours else None
        return None

    async def _report(self, own: Failure) -> None:
        self._give(CLEANUP_S)
        if self.failure is not None:
            return
        if self._rank:
            await self._connected.wait()
        self._tell(own)
        await self._all_told.wait()

    def _tell(self, own: Failure) -> None:
        """Let rank 0 know of a failure here."""
        if self._rank == 0:
            self._suspect(own)
        elif 0 in self._writers:
            _send(self._writers[0], "failed", **asdict(own))

    def _note_stall(self, rank: int, place: str) -> None:
        """Note on rank 0 where a rank waits; nowhere: it goes on."""
        self._stalled.pop(rank, None)
        if place:
            self._stalled[rank] = place
        if len(self._stalled) == self._world_size:
            waits = "; ".join(f"rank {r} at {self._stalled[r]}" for r in sorted(self._stalled))
            text = (
                f"All ranks have been waiting for each other for {STALL_S:.0f} s, so they don't run"
                f" the same step: {waits}. Call the model, the Trainer and collectives on every"
                " rank alike, never under `if rank == 0`, and give all replicas the same number of"
                " batches."
            )
            self._suspect(Failure(NO_RANK, NO_RANK, text))

    def _suspect(self, failure: Failure) -> None:
        """Collect what arrives together, on rank 0."""
        if not self._candidates:
            self._loop.call_later(EVENT_S, self._decide)
        self._candidates.append(failure)

    def _decide(self) -> None:
        """Choose the first error, and tell it to all."""
        self._candidates.sort(key=Failure.plausibility)
        verdict = self._candidates[0]
        if verdict.rank == NO_RANK and len(self._stalled) < self._world_size:
            self._candidates.clear()  # a rank went on after all
            return
        for writer in self._writers.values():
            _send(writer, "verdict", **asdict(verdict))
        self._learn(verdict)
        self._count(0)

    def _count(self, rank: int) -> None:
        """Count who knows, on rank 0; when all do, whoever reported may go on and end."""
        self._told.add(rank)
        if self.failure is not None and self._told.issuperset(self._writers):
            for writer in self._writers.values():
                _send(writer, "all told")
            self._all_told.set()

    def _learn(self, failure: Failure) -> None:
        if self.failure is not None or self._closing.is_set():
            return
        self.failure = failure
        if self._exit is None:
            self._give(GRACE_S)
        self._say(f"{failure}")
        threading.Thread(target=self._abort, name="gpipe-abort", daemon=True).start()

    def _give(self, seconds: float) -> None:
        """End the process after this time, unless the run is torn down before."""
        if self._exit is not None:
            self._exit.cancel()
        self._exit = self._loop.call_later(seconds, self._end, seconds)

    def _end(self, seconds: float) -> None:
        stack = "".join(traceback.format_stack(frame_of(self._main))[-3:])
        self._say(
            f"The main thread did not end within {seconds:.0f} s of the failure and is ended. It"
            f" was in\n{stack}"
        )
        os._exit(1)

    def _say(self, text: str) -> None:
        """Print, unless the terminal is gone or doesn't read."""
        line = f"\n[rank {self._rank}] {text}"
        printing = threading.Thread(target=_print, args=(line,), name="gpipe-say", daemon=True)
        printing.start()
        printing.join(1.0)


def _print(line: str) -> None:
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _bound_exit() -> None:
    threading.main_thread().join()
    time.sleep(EXIT_S)
    os._exit(1)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """The messages of a connection, until it ends."""
    while True:
        try:
            line = await reader.readline()
        except OSError:
            return
        if not line.endswith(b"\n"):
            return
        what, value = json.loads(line)
        yield what, value


def _send(writer: asyncio.StreamWriter, what: str, **value: Any) -> None:
    if not writer.is_closing():
        writer.write(json.dumps([what, value]).encode() + b"\n")


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the system find out when the other machine is gone."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    keep_from_children(connection)
