"""One error ends all processes, and every one of them says which error it was.

A thread of each process holds a connection to rank 0's hub, which decides. It hears of an error
from the process that failed, and of a killed one by its connection, which the system closes. What
arrives within half a second counts as one event: a lost connection of the pipeline is taken for the
consequence of another error, if there is one. The first error goes to every process, which prints
it, aborts its process groups, and ends if its main thread, blocked in who knows what, does not do
so by itself. ::

    rank 2: ValueError ──failed──> hub on rank 0 ──verdict──> ranks 0, 1, 2, 3: print, abort, end
    rank 3: killed     ──  end ──>

If rank 0 goes, the connections to it end, and that is the verdict. If all ranks do nothing but wait
for each other for two minutes, they don't run the same step, and that is a failure, too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.frames import place_of
from lightning_gpipe.failure.hub import Hub
from lightning_gpipe.failure.member import Member
from lightning_gpipe.failure.reason import ORPHAN, Failure, FailureKind
from lightning_gpipe.failure.screen import say
from lightning_gpipe.failure.stall import Stall

_TICK_S = 1.0


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
        deadlines: How long what is waited for.
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
        deadlines: Deadlines,
    ) -> None:
        self.failure: Failure | None = None
        self._rank, self._stages = rank, stages
        self._abort, self._deadlines = abort, deadlines
        self._main = threading.get_ident()
        self._stall = Stall(self._main, on_cpu)
        self._exit: asyncio.TimerHandle | None = None
        self._aborting: threading.Thread | None = None
        hub, address = None, None
        if rank == 0:
            server = _listen(host, world_size)
            address = host, server.getsockname()[1], secrets.token_hex(16)
            hub = Hub(server, address[2], stages, world_size, deadlines)
        self._member = Member(rank, broadcast(address), self._learn, self._say)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._watch(hub),),
            name="gpipe-watchdog",
            daemon=True,
        )
        self._thread.start()

    # ------------------------------------------------------------------ the main thread's side

    def report(self, error: BaseException, kind: FailureKind | None = None) -> Failure:
        """Tell all processes of an error, and wait until they know.

        Args:
            error: The error.
            kind: What it is, if the caller knows it.

        Returns:
            The first failure of the run, which may be another process's.
        """
        own = Failure.of(error, self._rank, self._stages, kind)
        # too late: the thread is gone, or who should answer is
        with suppress(RuntimeError, FutureTimeoutError):
            self._call(self._report(own)).result(self._deadlines.grace_s)
        return self.failure or own

    def finish(self) -> Failure | None:
        """Wait until every process is through with the run. Collective.

        Returns:
            None; or the failure, if one has failed after all.
        """
        with suppress(RuntimeError):
            self._call(self._member.finish()).result()
        return self.failure

    def close(self) -> None:
        """End the thread: this process's part of the run is over."""
        if self._aborting is not None:
            self._aborting.join(self._deadlines.abort_s)
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * self._deadlines.grace_s)
        if not self._thread.is_alive():
            self._loop.close()
            del self._abort  # it knows the process groups, and their threads end with the last one
        if self.failure is not None:  # what is left of the process groups may block the exit
            threading.Thread(
                target=_bound_exit, args=(self._deadlines.exit_s,), name="gpipe-exit", daemon=True
            ).start()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        if self._loop.is_closed():
            coroutine.close()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # ------------------------------------------------------------------ the thread

    async def _watch(self, hub: Hub | None) -> None:
        if hub is not None:
            await hub.open()
        tasks = [
            asyncio.create_task(self._member.listen()),
            asyncio.create_task(self._watch_main_thread()),
        ]
        await self._closing.wait()
        if self._exit is not None:
            self._exit.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._member.close()
        if hub is not None:
            await hub.close()

    async def _watch_main_thread(self) -> None:
        """Tell rank 0 when the main thread does nothing but wait, and when it goes on."""
        place = ""
        while True:
            await asyncio.sleep(_TICK_S)
            launcher = multiprocessing.parent_process()
            if launcher is not None and not launcher.is_alive():
                stage = self._rank % self._stages
                self._member.tell(Failure(self._rank, stage, ORPHAN, "orphan"))
            stalls = self._stall.seconds() >= self._deadlines.stall_s
            was, place = place, place_of(self._main) if stalls else ""
            if bool(was) != bool(place):
                self._member.tell_stall(place)

    async def _report(self, own: Failure) -> None:
        self._give(self._deadlines.cleanup_s)
        if self.failure is None:
            await self._member.report(own)

    def _learn(self, failure: Failure) -> None:
        if self.failure is not None or self._closing.is_set():
            return
        self.failure = failure
        if self._exit is None:
            self._give(self._deadlines.grace_s)
        self._say(failure.line)
        self._aborting = threading.Thread(target=self._abort, name="gpipe-abort", daemon=True)
        self._aborting.start()

    def _give(self, seconds: float) -> None:
        """End the process after this time, unless the run is torn down before."""
        if self._exit is not None:
            self._exit.cancel()
        self._exit = self._loop.call_later(seconds, self._end, seconds)

    def _end(self, seconds: float) -> None:
        self._say(
            f"The main thread did not end within {seconds:.0f} s of the failure and is ended. It"
            f" was at {place_of(self._main)}"
        )
        if self._rank == 0 and self.failure is not None:
            say(f"\n{self.failure}")
        os._exit(1)

    def _say(self, text: str) -> None:
        say(f"[rank {self._rank}] {text}")


def _bound_exit(seconds: float) -> None:
    threading.main_thread().join()
    time.sleep(seconds)
    os._exit(1)


def _listen(host: str, world_size: int) -> socket.socket:
    """A socket that only other ranks' machines can reach: bound to the main address alone.

    Where that isn't an address of this machine (behind a router), or stands for this machine alone
    (a name that resolves to 127.0.1.1), all interfaces are bound.
    """
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    is_local = str(address[0]).startswith("127.") or address[0] == "::1"
    means_local = host.startswith("127.") or host in ("localhost", "::1")
    if not is_local or means_local:
        with suppress(OSError):
            return socket.create_server(
                (str(address[0]), 0), family=family, backlog=world_size + 64
            )
    return socket.create_server(("", 0), family=family, backlog=world_size + 64)
