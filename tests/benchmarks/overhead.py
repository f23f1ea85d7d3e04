"""What the package costs beside the work itself.

``plain``: one stage, one micro-batch, nothing recomputed, against a Trainer without a strategy, on
a step of about 50 ms: as many samples as that takes here. ``norm``: batch norm with statistics per
mini-batch against nn.BatchNorm as it is, on the conv net, one stage, 4 micro-batches. In both the
same process fits with the one and the other in turn, since a process is a few percent faster or
slower than another for as long as it lives. These and ``balance`` are medians of the rounds'
ratios, in several launches. ``actions``: the engine's time for each forward and backward of a
micro-batch of layers that do next to nothing, from steps of 64 and of 192 micro-batches, with a
profile. ``chunks``: the step's time for each micro-batch, from 8 to 512, over the same for 8, in
turns of three steps. ``messages``: half of the way there and back between two processes of one
machine, alone and beside processes that compute. ``batches``: until all stages have a large batch
and the last one has read it, looked at where it lies, and sent in pieces. ``cut``: from ``fit``
until the first step of a model of 1,000 layers. ``balance``: steps balanced by time over those
balanced by operations, with layers that take long and compute little.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import math
import multiprocessing
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm import messages
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.executor import Executor
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import simulate
from tests.benchmarks.contestants.lightning import Module, Same, Turns, gpipe
from tests.benchmarks.report import Table
from tests.benchmarks.turns import Contestant, Result, Turn, launches_of, take_turns
from tests.benchmarks.workloads import (
    SleepingLayer,
    Workload,
    conv_net,
    empty,
    emulated,
    transformer,
)
from tests.ranks import run_ranks

PARTS = ["plain", "norm", "actions", "chunks", "messages", "batches", "cut", "balance"]
FEW, MANY = 64, 192
_FIRST = 8  # steps of a fit that don't count: some checks run in the 1st, 2nd, 4th, 8th


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    launches_of(parser, 5)
    parser.set_defaults(rounds=25)


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    for part in arguments.parts:
        yield from _RUN[part](arguments)


def _plain(arguments: argparse.Namespace) -> list[Table]:
    sized = partial(transformer, blocks=2, width=128, length=64)
    few = argparse.Namespace(rounds=3, steps=arguments.steps, launches=1)
    tried = _same_processes(sized(batch=20), few, ("plain Trainer", _auto)).rows[0][1]
    samples = 20 if isinstance(tried, str) else round(20 * 50 / tried[0])
    workload = sized(batch=samples)
    ours = partial(GPipeStrategy, 1, checkpoint="never")
    table = _same_processes(
        workload, arguments, ("plain Trainer", _auto), ("lightning-gpipe", ours)
    )
    return [replace(table, title=f"One stage, one micro-batch of {samples} samples, never")]


def _norm(arguments: argparse.Namespace) -> list[Table]:
    deferred = partial(GPipeStrategy, 4, checkpoint="never")
    as_it_is = partial(deferred, deferred_batch_norm=False)
    tables = []
    for batch in (16, 64):
        modes = ("nn.BatchNorm", as_it_is), ("statistics per mini-batch", deferred)
        table = _same_processes(conv_net(batch), arguments, *modes)
        tables.append(replace(table, title=f"Batch norm, one stage, M=4, {batch} samples"))
    return tables


def _auto() -> str:
    return "auto"


def _same_processes(
    workload: Workload, arguments: argparse.Namespace, *modes: tuple[str, Callable[[], Any]]
) -> Table:
    """Short fits in one process, with one strategy and the other in turn."""
    contestant = Contestant("all", partial(_fits, workload, modes), 1)
    rounds, steps, launches = arguments.rounds, arguments.steps, arguments.launches
    result = take_turns([contestant], rounds, steps, warm_up=1, launches=launches)["all"]
    table = Table("", ["step, ms", "ratio, median of rounds"])
    first = modes[0][0]
    for name, _ in modes:
        seconds = [notes[0][name] for notes in result.notes]
        ratios = [notes[0][name] / notes[0][first] for notes in result.notes]
        figures = [1e3 * statistics.median(seconds), statistics.median(ratios)] if seconds else []
        table.rows.append((name, result.error or figures))
    return table


def _fits(workload: Workload, modes: Sequence[tuple[str, Callable[[], Any]]], turn: Turn) -> None:
    module, found = Module(workload), dict[str, float]()
    turn.notes.append(lambda: found)
    for steps in turn.rounds():
        modes = modes[::-1]
        for name, strategy in modes:
            found[name] = _fit(workload, module, strategy(), steps)


def _fit(workload: Workload, module: Module, strategy: Any, steps: int) -> float:
    """Seconds of a step, without the first ones of a fit."""
    times = _Times()
    L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=_FIRST + steps + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    ).fit(module, DataLoader(Same(partial(workload.batch, 1)), batch_size=None))
    return (times.starts[-1] - times.starts[_FIRST]) / steps


class _Times(L.Callback):
    """When each step of a fit began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def _actions(arguments: argparse.Namespace) -> list[Table]:
    found = {}
    for stages in (1, 2):
        for mode in ("mini-batch", "micro-batch"):
            for chunks in (FEW, MANY):
                name = f"{stages} {mode} {chunks}"
                found[name] = gpipe(empty(), stages, chunks, "never", name, step=mode)
    results = take_turns([*found.values()], min(arguments.rounds, 7), arguments.steps, warm_up=6)
    table = Table(
        "Engine time of an action on empty layers, microseconds",
        ["one stage", "two stages, with messages"],
    )
    for mode in ("mini-batch", "micro-batch"):
        table.rows.append((f"{mode} step", [_slope_us(results, k, mode) for k in (1, 2)]))
    profile = take_turns([_profiled(1), _profiled(2)], 1, arguments.steps, warm_up=3)
    for result in profile.values():
        print(result.notes[-1][0]["profile"] if not result.error else result.error)
    return [table]


def _slope_us(results: dict[str, Result], stages: int, mode: str) -> float:
    """Microseconds that a forward or a backward more takes."""
    few, many = (results[f"{stages} {mode} {chunks}"].median_s for chunks in (FEW, MANY))
    return 1e6 * (many - few) / (2 * (MANY - FEW))


def _profiled(stages: int) -> Contestant:
    inner = gpipe(empty(), stages, MANY, "never", f"profile of {stages}")
    return Contestant(inner.name, partial(_profile, inner), stages)


def _profile(inner: Contestant, turn: Turn) -> None:
    """Profile what the executor runs."""
    profile, run_actions = cProfile.Profile(), Executor.run

    def run(self: Executor, *args: Any, **kwargs: Any) -> None:
        profile.enable()
        try:
            run_actions(self, *args, **kwargs)
        finally:
            profile.disable()

    def notes() -> dict[str, Any]:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
        profile.clear()
        return {"profile": f"{inner.name} stages, rank {turn.rank}:\n{text.getvalue()}"}

    Executor.run = run  # type: ignore[method-assign]
    turn.notes.append(notes)
    inner.run(turn)


def _chunks(arguments: argparse.Namespace) -> list[Table]:
    sizes = (8, 32, 128, 512)
    tables = []
    for stages in (1, 2):
        workload = emulated(2, 0.002)
        found = [gpipe(workload, stages, m, "always", str(m)) for m in sizes]
        # a turn's first step starts with cold caches, which short steps feel more than long ones
        results = take_turns(found, min(arguments.rounds, 5), 3, warm_up=3)
        table = Table(
            f"Step time of a micro-batch, K={stages}, always, layers of 2 ms",
            ["ms: step / length of fill-drain in forwards", "over that for M=8"],
        )
        length = {m: simulate(fill_drain(rounds(stages), m, "always")).length for m in sizes}
        first = results["8"].median_s / length[8]
        for m in sizes:
            result = results[str(m)]
            each = result.median_s / length[m]
            table.rows.append((f"M={m}", result.error or [1e3 * each, each / first]))
        tables.append(table)
    return tables


def _messages(arguments: argparse.Namespace) -> list[Table]:
    sizes = {"64 B": 64, "16 KiB": 1 << 14, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22}
    found = []
    for others in 0, os.cpu_count() or 1:
        with _spinning(others):
            found.append(run_ranks(_one_way_us, 2, [*sizes.values()], 4 * arguments.rounds)[0])
    columns = [f"{who}, cores {how}" for how in ("idle", "busy") for who in ("ours", "gloo")]
    table = Table("A message, microseconds", columns)
    table.rows = [(name, [*idle, *busy]) for name, idle, busy in zip(sizes, *found, strict=True)]
    return [table]


def _batches(arguments: argparse.Namespace) -> list[Table]:
    table = Table("A batch for all stages, milliseconds", ["looked at", "in pieces", "ratio"])
    for stages in 2, 4:
        for mb in 16, 128:
            looked, sent = run_ranks(_batch_ms, stages, mb, arguments.rounds, timeout_s=600)[0]
            table.rows.append((f"{mb} MiB, K={stages}", [looked, sent, sent / looked]))
    return [table]


def _batch_ms(mb: int, times: int) -> list[float]:
    """Medians of both ways."""
    groups = Groups.connect(
        torch.distributed.get_world_size(), 1, "gloo", torch.device("cpu"), timedelta(seconds=60)
    )
    stages, found = groups.pipeline, list[float]()
    batch = torch.ones(mb << 18) if stages.index == 0 else None
    for limit in mb << 20, math.inf:
        times_s = []
        with mock.patch.object(messages, "_SHARED", limit):
            for _ in range(times):
                stages.all_reduce(torch.zeros(1))
                start = time.perf_counter()
                came = stages.broadcast("batch", batch, 0)
                if stages.index == len(stages.ranks) - 1:
                    came.sum()
                stages.all_reduce(torch.zeros(1))
                times_s.append(time.perf_counter() - start)
        del came
        found.append(1e3 * statistics.median(times_s))
    groups.close()
    return found


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Keep cores busy."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def _one_way_us(sizes: list[int], times: int) -> list[list[float]]:
    """For each size the time over this package's connection and over gloo."""
    cpu = torch.device("cpu")
    groups = Groups.connect(2, 1, "gloo", cpu, timedelta(seconds=60))
    ours = groups.channel(1 - groups.stage, 0, "activations")
    over_gloo = replace(ours, data=groups.pipeline.host)
    found: list[list[float]] = []
    for size in sizes:
        found.append([])
        for channel in (ours, over_gloo):
            if groups.stage == 0:
                found[-1].append(1e6 * channel.echo_s(channel, size, times))
            else:
                channel.answer(channel, size, times)
    groups.close()
    return found


def _cut(arguments: argparse.Namespace) -> list[Table]:
    width, count = 16, 1000

    def layers() -> list[nn.Module]:
        return [nn.Linear(width, width) for _ in range(count)]

    workload = Workload("1,000 layers", layers, empty(width=width).batch, nn.functional.mse_loss,
                        lambda stages: [count // stages] * stages)  # fmt: skip
    table = Table("Until the first step of a model of 1,000 layers", ["seconds"])
    for stages, balance in ((1, "flops"), (4, "flops"), (4, "time")):
        contestant = Contestant("cut", partial(_until_step, workload, balance), stages)
        result = take_turns([contestant], 1, 1, warm_up=0)["cut"]
        seconds = max((notes["until"] for notes in result.notes[-1]), default=0.0)
        table.rows.append((f"K={stages}, by {balance}", result.error or [seconds]))
    return [table]


def _until_step(workload: Workload, balance: Any, turn: Turn) -> None:
    found: dict[str, Any] = {}
    turn.notes.append(lambda: found)
    module, start = Module(workload), time.perf_counter()

    class First(L.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            found.setdefault("until", time.perf_counter() - start)

    L.Trainer(
        accelerator="cpu",
        devices=turn.world_size,
        strategy=GPipeStrategy(8, balance=balance),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[First(), Turns(turn)],
    ).fit(module, DataLoader(Same(partial(workload.batch, 8)), batch_size=None))


def _ratio(title: str, one: Contestant, other: Contestant, arguments: argparse.Namespace) -> Table:
    results = take_turns(
        [one, other], arguments.rounds, arguments.steps, warm_up=3, launches=arguments.launches
    )
    first, second = results[one.name], results[other.name]
    ratios = [a / b for a, b in zip(first.step_s, second.step_s, strict=False)]
    table = Table(title, ["step, ms", "ratio, median of rounds"])
    for name, result, ratio in (
        (other.name, second, 1.0),
        (one.name, first, statistics.median(ratios) if ratios else float("nan")),
    ):
        table.rows.append((name, result.error or [1e3 * result.median_s, ratio]))
    return table


def _balance(arguments: argparse.Namespace) -> list[Table]:
    unit_s, count = 0.005, 6
    units = [(count - 1) * unit_s, *[unit_s] * (count - 1)]
    workload = replace(
        emulated(count, unit_s), layers=lambda: [SleepingLayer(64, unit) for unit in units]
    )
    by_flops, by_time = (
        gpipe(workload, 2, 8, "always", f"by {balance}", balance=balance)
        for balance in ("flops", "time")
    )
    return [_ratio("Layers that mislead, K=2, M=8, always", by_flops, by_time, arguments)]


_RUN = {
    "plain": _plain,
    "norm": _norm,
    "actions": _actions,
    "chunks": _chunks,
    "messages": _messages,
    "batches": _batches,
    "cut": _cut,
    "balance": _balance,
}
