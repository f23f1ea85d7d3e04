"""Contestants in processes of their own that take turns, so that they share the machine's moods.

All contestants' processes are forked from one that has imported everything, and live through all
rounds of a launch. In a round each contestant in turn runs a few steps while the others wait; the
next round begins with another one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.ranks import HOST, free_port

_CONTEXT = multiprocessing.get_context("fork")
_M_MMAP_THRESHOLD = -3  # of mallopt
_PR_SET_PDEATHSIG = 1  # of prctl


class Turn:
    """What a contestant's process knows of the rounds.

    Args:
        pipe: To who leads the rounds.
        rank: Of this process among the contestant's.
        world_size: Their number.
    """

    def __init__(self, pipe: Connection, rank: int, world_size: int) -> None:
        self._pipe = pipe
        self.rank, self.world_size = rank, world_size
        #: Give what the contestant says of itself at the end of each round, such as seconds slept.
        self.notes: list[Callable[[], dict[str, Any]]] = []
        #: Bytes of messages that no process's resident memory counts.
        self.under_way: Callable[[], int] = lambda: 0
        self._start: float | None = None

    def next(self) -> int:
        """End a round, if one runs, and wait for the next; returns its number of steps.

        Ends the process when there is none.
        """
        if self._start is not None:
            end = time.perf_counter()
            peak = own_memory_mb("VmHWM") + self.under_way() / 2**20
            said = {name: value for notes in self.notes for name, value in notes().items()}
            self._pipe.send((self._start, end, peak, said))
        else:
            self._pipe.send("ready")
        steps = self._pipe.recv()
        if not steps:
            sys.stdout.flush()
            os._exit(0)
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        self._pipe.send("ready")
        self._pipe.recv()
        self._start = time.perf_counter()
        return int(steps)

    def rounds(self) -> Iterator[int]:
        """The numbers of steps of all rounds; the process ends after the last one."""
        while True:
            yield self.next()


@dataclass
class Contestant:
    """What takes turns.

    Args:
        name: For the table.
        run: Runs in each of its processes, and asks the turn for its steps.
        processes: Their number.
    """

    name: str
    run: Callable[[Turn], None]
    processes: int


@dataclass
class Result:
    """What a contestant did.

    Args:
        step_s: Of every round the seconds of a step.
        peak_mb: For each process the peak of its own memory above what it began with, the highest
            of all rounds; see :func:`own_memory_mb`.
        notes: Of every round what its processes said.
        error: Why it couldn't run.
    """

    step_s: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    notes: list[list[dict[str, Any]]] = field(default_factory=list)
    error: str | None = None

    @property
    def median_s(self) -> float:
        """The median of a step."""
        return median(self.step_s)


def median(figures: Sequence[float]) -> float:
    """The median of figures; not a number where there are none."""
    return statistics.median(figures) if figures else float("nan")


def spread(figures: Sequence[float]) -> float:
    """Half of what lies between the quartiles of figures, as a share of their median."""
    if len(figures) < 2:
        return float("nan")
    first, middle, third = statistics.quantiles(figures)
    return (third - first) / 2 / middle


def launches_of(parser: argparse.ArgumentParser, launches: int) -> None:
    """Add the option for :func:`take_turns`.

    Args:
        parser: Of a suite.
        launches: What it is by default.
    """
    about = "of all processes, each for a part of the rounds; default: %(default)s"
    parser.add_argument("--launches", type=int, default=launches, help=about)


def take_turns(
    contestants: Sequence[Contestant],
    rounds: int,
    steps: int,
    warm_up: int = 2,
    timeout_s: float = 600.0,
    exact_memory: bool = False,
    launches: int = 1,
) -> dict[str, Result]:
    """Let contestants take turns.

    Args:
        contestants: Each with a name of its own.
        rounds: That count.
        steps: Mini-batches in a turn.
        warm_up: Rounds before those.
        timeout_s: For a turn.
        exact_memory: Whether freed memory goes back at once, so that the peak is of what is held.
        launches: How often all processes are started anew, each time for a part of the rounds.
            Where a process's memory lies makes it a few percent faster or slower for as long as it
            lives.

    Returns:
        By name what they did.
    """
    results = {contestant.name: Result() for contestant in contestants}
    for launch in range(launches):
        left = [c for c in contestants if results[c.name].error is None]
        numbers = range(launch * rounds // launches, (launch + 1) * rounds // launches)
        _launch(left, results, numbers, steps, warm_up, timeout_s, exact_memory)
    return results


def _launch(
    contestants: Sequence[Contestant],
    results: dict[str, Result],
    rounds: range,
    steps: int,
    warm_up: int,
    timeout_s: float,
    exact_memory: bool,
) -> None:
    groups: dict[str, _Group] = {}
    try:
        for contestant in contestants:
            group = _Group(contestant, exact_memory)
            groups[contestant.name] = group
            results[contestant.name].error = group.wait_all(timeout_s)
        for number in range(rounds.start - warm_up, rounds.stop):
            names = [name for name in groups if results[name].error is None]
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                groups[name].turn(results[name], steps, number in rounds, timeout_s)
    finally:
        for group in groups.values():
            group.end()


def own_memory_mb(name: str) -> float:
    """What the kernel says of this process's memory, without pages of files such as libraries.

    Which of those are resident depends on the kernel and on what else runs, not on who is measured.
    They only become more, so those of now are at least those of the peak.
    """
    status = Path("/proc/self/status").read_text()
    kilobytes = {
        key: float(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M)
    }
    return (kilobytes[name] - kilobytes["RssFile"]) / 1024


class _Group:
    """The processes of a contestant.

    Args:
        contestant: The contestant.
        exact_memory: See :func:`take_turns`.
    """

    def __init__(self, contestant: Contestant, exact_memory: bool) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._base_mb: list[float] = []
        port = free_port()
        for rank in range(contestant.processes):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_run, args=(contestant, theirs, rank, port, exact_memory), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_all(self, timeout_s: float) -> str | None:
        """Wait for a word of all processes; returns an error, if there was one."""
        answers, error = self._answers(timeout_s)
        if error is None and not self._base_mb:
            self._base_mb = [float(answer[1]) for answer in answers]
            return self.wait_all(timeout_s)
        return error

    def turn(self, result: Result, steps: int, counts: bool, timeout_s: float) -> None:
        """Run a turn."""
        for pipe in self._pipes:
            pipe.send(steps)
        result.error = result.error or self.wait_all(timeout_s)
        if result.error is not None:
            return
        for pipe in self._pipes:
            pipe.send("go")
        answers, result.error = self._answers(timeout_s)
        if result.error is not None or not counts:
            return
        begin, end = min(a[0] for a in answers), max(a[1] for a in answers)
        result.step_s.append((end - begin) / steps)
        peaks = [a[2] - base for a, base in zip(answers, self._base_mb, strict=True)]
        before = result.peak_mb or peaks
        result.peak_mb = [max(a, b) for a, b in zip(peaks, before, strict=True)]
        result.notes.append([a[3] for a in answers])

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(0)
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, timeout_s: float) -> tuple[list[Any], str | None]:
        """A message of every process, or what went wrong."""
        answers: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(
                waiting.values(), max(0.0, end - time.monotonic())
            )
            if not ready:
                return [], f"no answer in {timeout_s:.0f} s"
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except EOFError:
                    return [], f"process {rank} died"
                if isinstance(answers[rank], Exception):
                    return [], str(answers[rank])
        return [answers[rank] for rank in range(len(self._pipes))], None


class _ContestantError(Exception):
    """What went wrong in a contestant's process."""


def _run(
    contestant: Contestant, pipe: Connection, rank: int, port: int, exact_memory: bool
) -> None:
    """Run in a contestant's process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with who leads the rounds
    os.environ.update(
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(contestant.processes),
        LOCAL_WORLD_SIZE=str(contestant.processes),
        TORCHELASTIC_RUN_ID="benchmark",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not os.environ.get("SHOW_ERRORS"):
        os.dup2(1, 2)
    if exact_memory:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        gc.collect()
        libc.malloc_trim(0)  # what imports freed would hold tensors that nobody sees
    pipe.send(("base", own_memory_mb("VmRSS")))
    try:
        contestant.run(Turn(pipe, rank, contestant.processes))
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        pipe.send(_ContestantError(f"{type(error).__name__}: {text[0] if text else ''}"))
    os._exit(1)
