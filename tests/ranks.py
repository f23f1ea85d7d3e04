"""Runs test functions on several processes, with a deadline.

Processes start once per world size and run many functions: starting them costs seconds, importing
Lightning most of it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.ranks_preload"])
_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """A function failed on a rank; carries the rank's traceback."""


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
        RankError: With the traceback of the first rank that failed, or the ranks that missed the
            deadline.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    try:
        return pool.call(function, args, timeout_s)
    except RankError:
        _pools.pop(world_size).stop()
        raise


class Pool:
    """A world of processes that wait for functions."""

    def __init__(self, world_size: int) -> None:
        self._store = tempfile.NamedTemporaryFile(prefix="gpipe-store-")  # noqa: SIM115
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, rank, world_size, self._store.name)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        waiting = dict(enumerate(self._pipes))
        results: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        while waiting:
            ready = multiprocessing.connection.wait(
                waiting.values(), max(0.0, end - time.monotonic())
            )
            if not ready:
                raise RankError(
                    f"{function.__name__}: ranks {sorted(waiting)} did not end within {timeout_s} s"
                )
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    failed, value = waiting.pop(rank).recv()
                except EOFError:
                    raise RankError(f"{function.__name__}: rank {rank} died") from None
                if failed:
                    raise RankError(f"{function.__name__} failed on rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._store.close()


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
    processes: list[BaseProcess] = [
        _CONTEXT.Process(target=_alone, args=(function, rank, world_size, folder, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _alone(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, args: Any
) -> None:
    with open(folder / str(rank), "wb") as screen:
        os.dup2(screen.fileno(), 1)
        os.dup2(screen.fileno(), 2)
    _join(rank, world_size, str(folder / "store"))
    function(*args)


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    _join(rank, world_size, store)
    environment = dict(os.environ)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the pool is gone; peers that are stuck must not keep this rank alive
        os.environ.clear()  # what is left of the last function, such as Lightning's seed
        os.environ.update(environment)
        try:
            answer = False, function(*args)
        except BaseException:
            answer = True, traceback.format_exc()
        try:
            pipe.send(answer)
        except BrokenPipeError:
            os._exit(1)


def _join(rank: int, world_size: int, store: str) -> None:
    """Become a rank."""
    torch.set_num_threads(1)
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
    )
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


@atexit.register
def _stop_pools() -> None:
    for pool in list(_pools.values()):
        pool.stop()
    _pools.clear()
