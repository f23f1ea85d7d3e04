"""Runs test functions on several processes, with a deadline.

Processes start once per world size and run many functions: starting them costs time, importing
Lightning most of it. A function may fail on any rank: all ranks answer, and the same processes run
the next function in a new world of process groups.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
AFTER_FAILURE_S = 20.0  # for all other ranks to end when one has failed
_ABORT_S = 10.0  # for the groups of a run that failed to end
_STACKS_S = 2.0  # for ranks that are late to write where they are
_TIMEOUT = timedelta(seconds=60)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ranks_preload"])
_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """A function failed on a rank.

    Its text holds what every rank that failed says, the first to end first.

    Args:
        what: What happened.
        errors: The traceback of every rank that failed, by rank, in the order of their ends.
    """

    def __init__(self, what: str, errors: dict[int, str]) -> None:
        super().__init__("\n".join([what, *(f"rank {r}:\n{errors[r]}" for r in errors)]))
        self.errors = errors


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Call a function on every rank of a world of gloo processes.

    Args:
        function: A module-level function; inside, Lightning finds a cluster of ``world_size``
            processes on one node.
        world_size: Number of processes.
        args: Its arguments.
        timeout_s: Deadline for all ranks together.

    Returns:
        What it returned, by rank.

    Raises:
        RankError: With the tracebacks of all ranks that failed, and the ranks that died or missed
            the deadline.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    try:
        return pool.call(function, args, timeout_s)
    finally:
        if not pool.is_usable:
            _pools.pop(world_size).stop()


@dataclass(frozen=True)
class _Answer:
    """A rank's.

    Args:
        value: What the function returned.
        error: The traceback, if it failed.
        in_world: Whether the rank's process groups are still those that it was given.
    """

    value: Any
    error: str | None
    in_world: bool


@dataclass(frozen=True)
class _World:
    """What a rank needs to join: the store's port, a number, and a port for Lightning."""

    store_port: int
    number: int
    main_port: int


class Pool:
    """Processes that wait for functions.

    Args:
        world_size: Their number.
    """

    def __init__(self, world_size: int) -> None:
        self.is_usable = True
        self._stacks = tempfile.TemporaryDirectory()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._world = _World(self._store.port, 0, free_port())
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, rank, world_size, self._stacks.name)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        """Call a function on all ranks; see :func:`run_ranks`."""
        for pipe in self._pipes:
            pipe.send((function, args, self._world))
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        in_world = True
        waiting = dict(enumerate(self._pipes))
        end = time.monotonic() + timeout_s
        limit = f"{timeout_s} s"
        while waiting and (ready := _wait(waiting, end)):
            for rank in ready:
                try:
                    answer: _Answer = waiting.pop(rank).recv()
                except (EOFError, OSError):
                    answer = _Answer(None, "Its process died.", False)
                    self.is_usable = False
                in_world = in_world and answer.in_world
                if answer.error is None:
                    values[rank] = answer.value
                else:
                    errors[rank] = answer.error
                    if time.monotonic() + AFTER_FAILURE_S < end:
                        end = time.monotonic() + AFTER_FAILURE_S
                        limit = f"{AFTER_FAILURE_S} s of the failure of rank {rank}"
        if not in_world:
            self._world = _World(self._store.port, self._world.number + 1, free_port())
        if waiting:
            self.is_usable = False
            late = f"ranks {sorted(waiting)} did not end within {limit}"
            where = self._stacks_of(sorted(waiting))
            raise RankError(f"{function.__name__}: {late}\n{where}", errors)
        if errors:
            raise RankError(f"{function.__name__} failed", errors)
        return [values[rank] for rank in range(len(self._pipes))]

    def _stacks_of(self, ranks: list[int]) -> str:
        """Where these ranks are, all of their threads."""
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR2)
        time.sleep(_STACKS_S)
        texts = {rank: Path(self._stacks.name, str(rank)).read_text() for rank in ranks}
        return "\n".join(f"rank {rank} is at:\n{text}" for rank, text in texts.items())

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._stacks.cleanup()


def _wait(waiting: dict[int, Connection], end: float) -> list[int]:
    """The ranks that have answered; none if the time is over."""
    left = max(0.0, end - time.monotonic())
    ready = multiprocessing.connection.wait(waiting.values(), left)
    return [rank for rank, pipe in waiting.items() if pipe in ready]


def stop_ranks() -> None:
    """End all processes that wait for functions; the next call starts new ones."""
    for pool in list(_pools.values()):
        pool.stop()
    _pools.clear()


def start_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any
) -> list[BaseProcess]:
    """Start processes that may end as they like.

    Args:
        function: Called on every rank, as by :func:`run_ranks`.
        world_size: Number of processes.
        folder: What rank r prints goes to the file ``r`` in it.
        args: The function's arguments.
    """
    port = free_port()
    processes: list[BaseProcess] = [
        _CONTEXT.Process(target=_alone, args=(function, rank, world_size, port, folder, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def free_port() -> int:
    """A port for those who want to listen there: until then a socket keeps others from it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((HOST, 0))
        port = int(keeper.getsockname()[1])
        keeper.detach()  # it is open until the process ends
        return port


def _alone(
    function: Callable[..., Any], rank: int, world_size: int, port: int, folder: Path, args: Any
) -> None:
    with open(folder / str(rank), "wb") as screen:
        os.dup2(screen.fileno(), 1)
        os.dup2(screen.fileno(), 2)
    _become(rank, world_size)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    os.environ["MASTER_PORT"] = str(port)
    _join(dist.FileStore(str(folder / "store"), world_size), rank, world_size)
    function(*args)


def _serve(pipe: Connection, rank: int, world_size: int, stacks: str) -> None:
    """Run functions until the pool is gone; on SIGUSR2, write all stacks to a file."""
    with open(os.path.join(stacks, str(rank)), "w") as file:
        _become(rank, world_size)
        _run_functions(pipe, rank, world_size, file)


def _run_functions(pipe: Connection, rank: int, world_size: int, stacks: TextIO) -> None:
    world: _World | None = None
    modules = len(sys.modules)
    while True:
        try:
            function, args, new = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # peers that are stuck must not keep this rank alive
        if len(sys.modules) > modules:
            modules = len(sys.modules)
            gc.freeze()  # as in ranks_preload
        faulthandler.register(signal.SIGUSR2, stacks)  # a Trainer puts all signals back
        try:
            if new != world:
                _leave()
                _enter(new, rank, world_size)
                world = new
            answer = _call(function, args, new)
        except BaseException:
            answer = _Answer(None, traceback.format_exc(), False)
        if answer.error is not None:
            _leave()  # whoever waits for this rank hears of it
        try:
            pipe.send(answer)
        except ConnectionError:
            os._exit(1)
        except Exception:  # what can't be pickled
            pipe.send(_Answer(None, traceback.format_exc(), answer.in_world))


def _call(function: Callable[..., Any], args: Any, world: _World) -> _Answer:
    """Call a function, and forget what it leaves in the environment, such as Lightning's seed."""
    group, before = dist.group.WORLD, dict(os.environ)
    os.environ["MASTER_PORT"] = str(world.main_port)
    try:
        return _Answer(function(*args), None, dist.group.WORLD is group)
    finally:
        os.environ.clear()
        os.environ.update(before)
        gc.collect()  # what failed leaves groups in cycles, and each has threads that wake up


def _become(rank: int, world_size: int) -> None:
    """Look like a process of a cluster, and end with the tests, whatever this one waits for."""
    threading.Thread(target=_end_with_tests, name="tests-ended", daemon=True).start()
    # a loader's workers are forked, not by a server of their own that imports everything once more
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=HOST,
        OMP_NUM_THREADS="1",
    )


def _end_with_tests() -> None:
    tests = multiprocessing.parent_process()
    if tests is not None:
        tests.join()
        os._exit(1)


def _enter(world: _World, rank: int, world_size: int) -> None:
    """Join a new world."""
    store = dist.TCPStore(HOST, world.store_port, is_master=False)
    _join(dist.PrefixStore(str(world.number), store), rank, world_size)


def _join(store: dist.Store, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)


def _leave() -> None:
    """Leave the world, if there is one, so that no rank waits for this one."""
    end = time.monotonic() + _ABORT_S
    for thread in threading.enumerate():
        if thread.name == "gpipe-abort":  # it would abort the next world
            thread.join(max(0.0, end - time.monotonic()))
    gc.collect()  # groups end with their last reference, which a traceback may have held
    if dist.is_initialized():
        dist.destroy_process_group()


atexit.register(stop_ranks)
