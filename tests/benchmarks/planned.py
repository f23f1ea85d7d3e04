"""Plans against steps: how long a planned step takes, and how long it took.

Layers sleep 3 ms to 9 ms forward, and as long each for the gradients of input and weight, so that
any number of stages runs truly in parallel on few cores. The plan measures every layer by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.benchmarks.contestants.lightning import Module, gpipe
from tests.benchmarks.report import Table
from tests.benchmarks.turns import take_turns
from tests.benchmarks.workloads import SleepingLayer, Workload, emulated

LAYERS = 16


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    for stages, chunks in arguments.sizes:
        for step in ("mini-batch", "micro-batch"):
            for checkpoint in ("always", "never"):
                yield _compare(stages, chunks, step, checkpoint, arguments)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(int, text.split("x"))),
        nargs="+",
        default=[(2, 8), (4, 8), (8, 16)],
        metavar="KxM",
        help="stages and micro-batches, such as 4x8",
    )


def _workload() -> Workload:
    one = emulated(LAYERS, 0.003)

    def layers() -> list[nn.Module]:
        return [SleepingLayer(64, 0.003 * (1 + i % 3)) for i in range(LAYERS)]

    return Workload("uneven", layers, one.batch, one.loss, one.balance)


def _planned(stages: int, chunks: int, step: Any, checkpoint: str) -> tuple[float, list[int]]:
    """Seconds of a step, and the cut."""
    torch.set_num_threads(1)
    workload = _workload()
    (plan,) = (
        GPipeStrategy(chunks, balance="time", step=step)
        .plan(
            *(Module(workload), workload.batch(chunks)),
            devices=stages,
            stages=[stages],
            virtual_stages=[1],
            checkpoint=[checkpoint],
            device="cpu",
            measured=True,
        )
        .all
    )
    return float(plan.seconds or 0), [len(part) for stage in plan.stages for part in stage.layers]


def _compare(
    stages: int, chunks: int, step: Any, checkpoint: str, arguments: argparse.Namespace
) -> Table:
    workload = _workload()
    with futures.ProcessPoolExecutor(1, get_context("fork")) as alone:  # what computes can't fork
        planned, sizes = alone.submit(_planned, stages, chunks, step, checkpoint).result()
    contestant = gpipe(workload, stages, chunks, checkpoint, "took", step=step, balance=sizes)
    results = take_turns([contestant], arguments.rounds, arguments.steps, warm_up=6)
    table = Table(
        f"Emulated devices, K={stages}, M={chunks}, {step}, {checkpoint}",
        ["step, ms", "of the plan"],
        [("planned", [1e3 * planned, 1.0])],
    )
    took = results["took"]
    table.rows.append(("took", took.error or [1e3 * took.median_s, took.median_s / planned]))
    return table
