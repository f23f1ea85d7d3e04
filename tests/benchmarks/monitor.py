"""What PipelineMonitor costs, and whether the bubbles that it measures are those that it expects.

Cost: the same processes train mini-batches with the monitor and without it, in turns of one or two,
so that what else the machine does slows both. In a round 20 are with it, and it logs once; by
default it does so once in 50. ``without, again`` shows the noise. Bubbles: on emulated devices.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpipe import GPipeStrategy, PipelineMonitor
from tests.benchmarks.contestants.lightning import Module, Same, Turns
from tests.benchmarks.report import Table
from tests.benchmarks.turns import Contestant, Turn, take_turns
from tests.benchmarks.workloads import Workload, emulated, transformer
from tests.ranks import run_ranks

PARTS = ["cost", "bubbles"]
_MODES = "without", "with PipelineMonitor", "without, again"
_ON = 1
#: The modes of mini-batches, again and again. The last of a round logs.
_ORDER = 0, _ON, 2, 2, 0, _ON


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.set_defaults(rounds=25, steps=20)


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    if "cost" in arguments.parts:
        computing, sleeping = transformer(2, 128, 64, 16), emulated(2, 0.005)
        yield _cost("one stage, M=8, computing", computing, 1, arguments)
        yield _cost("two stages, M=8, layers of 5 ms", sleeping, 2, arguments)
        # a schedule that doesn't depend on what was measured
        options = {"step": "micro-batch", "schedule": "1f1b"}
        yield _cost(
            "two stages, M=8, layers of 5 ms, step='micro-batch'", sleeping, 2, arguments, **options
        )
    if "bubbles" in arguments.parts:
        yield _all_bubbles()


def _cost(
    title: str, workload: Workload, stages: int, arguments: argparse.Namespace, **options: Any
) -> Table:
    """Mini-batches with the monitor over those without."""
    every = len(_ORDER) * math.ceil(arguments.steps / _ORDER.count(_ON))
    contestant = Contestant("all", partial(_train, workload, options, every), stages)
    result = take_turns([contestant], arguments.rounds, every, warm_up=1)["all"]
    table = Table(f"PipelineMonitor, {title}", ["mini-batch, ms", "ratio, median of rounds"])
    if result.error:
        table.rows = [(_MODES[_ON], result.error)]
        return table
    rounds = [notes[0]["mini_batch_s"] for notes in result.notes]
    for mode, name in enumerate(_MODES):
        seconds = statistics.median(round_[mode] for round_ in rounds)
        ratio = statistics.median(round_[mode] / round_[0] for round_ in rounds)
        table.rows.append((name, [1e3 * seconds, ratio]))
    return table


class _OnAndOff(Turns):
    """Takes the monitor away from the Trainer for some mini-batches, and gives it back."""

    def __init__(self, turn: Turn, monitor: PipelineMonitor) -> None:
        super().__init__(turn)
        turn.notes.append(self._mean_s)
        self._monitor, self._place, self._since, self._is_first = monitor, 0, 0.0, True
        self._seconds: list[list[float]] = [[] for _ in _MODES]

    def _mean_s(self) -> dict[str, list[float]]:
        """Of each mode the mean of its mini-batches in the round that has ended."""
        means = [statistics.mean(seconds) for seconds in self._seconds]
        self._seconds = [[] for _ in _MODES]
        return {"mini_batch_s": means}

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *of_batch: Any) -> None:
        now = time.perf_counter()
        if not self._is_first:
            self._seconds[_ORDER[(self._place - 1) % len(_ORDER)]].append(now - self._since)
        self._is_first = not self._left  # it comes after what a round begins with
        super().on_train_batch_start(trainer, *of_batch)
        callbacks: list[L.Callback] = vars(trainer)["callbacks"]
        if self._monitor in callbacks:
            callbacks.remove(self._monitor)
        if _ORDER[self._place % len(_ORDER)] == _ON:
            callbacks.append(self._monitor)  # its hook for this mini-batch is still to come
        self._place += 1
        self._since = time.perf_counter()


def _train(workload: Workload, options: dict[str, Any], every: int, turn: Turn) -> None:
    monitor = PipelineMonitor(every)
    L.Trainer(
        accelerator="cpu",
        devices=turn.world_size,
        strategy=GPipeStrategy(
            8, checkpoint="always", balance=[*workload.balance(turn.world_size)], **options
        ),
        max_epochs=1,
        logger=_Bubbles(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_OnAndOff(turn, monitor), monitor],
    ).fit(Module(workload), DataLoader(Same(partial(workload.batch, 8)), batch_size=None))


def _all_bubbles() -> Table:
    table = Table("Bubbles of emulated devices, K=4, always, %", ["measured", "expected", "apart"])
    for step in ("mini-batch", "micro-batch"):
        for chunks in (4, 8, 32):
            found = run_ranks(_bubbles, 4, chunks, step, timeout_s=300)[0]
            measured, expected = (100 * statistics.median(row) for row in zip(*found, strict=True))
            table.rows.append((f"{step}, M={chunks}", [measured, expected, measured - expected]))
    return table


class _Bubbles(Logger):
    """Keeps the bubbles that are logged."""

    name, version = "bubbles", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[float, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "pipeline/bubble" in metrics:
            self.rows.append((metrics["pipeline/bubble"], metrics["pipeline/expected_bubble"]))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


def _bubbles(chunks: int, step: Any) -> list[tuple[float, float]]:
    """What is logged after the schedule is settled."""
    logger, workload = _Bubbles(), emulated(4, 0.005)
    L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=GPipeStrategy(
            chunks, checkpoint="always", balance=[*workload.balance(4)], step=step
        ),
        max_steps=18,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PipelineMonitor(3, table=False)],
    ).fit(Module(workload), DataLoader(Same(partial(workload.batch, chunks)), batch_size=None))
    return logger.rows[2:]
