"""What is measured: steps of emulated devices, and what recomputes take of real steps.

A stage of an emulated device sleeps for as long as the counted operations of its share of the
model say, so that any number of them runs truly in parallel on few cores. Steps run through the
Trainer; what they take beyond the simulated time is the engine, and the machine.
"""

from __future__ import annotations

from concurrent import futures
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from examples.paper import published
from examples.paper.speed import models
from examples.paper.tables import Table
from tests.benchmarks.contestants.lightning import gpipe
from tests.benchmarks.turns import take_turns
from tests.benchmarks.workloads import (
    SleepingLayer,
    Workload,
    amoebanet,
    transformer,
    with_balance,
)

#: Of a whole mini-batch on all devices together, by M: so much that the engine's part stays small.
FORWARD_S = {1: 0.3, 4: 0.6, 32: 1.2}
WIDTH = 64
PAPERS: dict[str, Any] = {"step": "micro-batch", "schedule": "fill_drain"}


def shares() -> dict[str, dict[int, tuple[float, ...]]]:
    """The stages' shares of each model, by K."""
    return {
        name: {k: model.partition(model.settings(k, k)).shares for k in published.STAGES}
        for name, model in models().items()
    }


def emulated() -> dict[str, dict[int, list[float]]]:
    """Throughput by M and K, of K=2 and M=1; see Table 2."""
    with futures.ProcessPoolExecutor(1, get_context("fork")) as alone:  # what computes can't fork
        found = alone.submit(shares).result()
    throughput: dict[str, dict[int, list[float]]] = {}
    for name, by_stages in found.items():
        steps = {m: _steps(by_stages, m) for m in published.MICRO_BATCHES}
        one = steps[1][2]
        throughput[name] = {m: [one / row[k] for k in row] for m, row in steps.items()}
    return throughput


def _steps(by_stages: dict[int, tuple[float, ...]], chunks: int) -> dict[int, float]:
    """How long a step of M micro-batches is, by K; a mini-batch's forward on one device is 1."""
    forward, contestants = FORWARD_S[chunks], []
    for k, found in by_stages.items():
        workload = Sleeping([forward * share / chunks for share in found]).workload
        contestants.append(gpipe(workload, k, chunks, "always", f"{k}", **PAPERS))
    results = take_turns(contestants, rounds=3, steps=1, warm_up=1)
    for result in results.values():
        if result.error:
            raise RuntimeError(result.error)
    return {k: results[f"{k}"].median_s / forward for k in by_stages}


class Sleeping:
    """A layer for each stage, that sleeps."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    @property
    def workload(self) -> Workload:
        return Workload(
            *("emulated", self._layers, self._batch, nn.functional.mse_loss),
            lambda stages: [1] * stages,
        )

    def _layers(self) -> list[nn.Module]:
        return [SleepingLayer(WIDTH, seconds) for seconds in self._seconds]

    def _batch(self, chunks: int) -> tuple[Tensor, Tensor]:
        return torch.ones(chunks, WIDTH), torch.ones(chunks, WIDTH)


def recomputes(stages: int = 2, chunks: int = 8) -> Table:
    """What recomputes take of the steps of small models that really compute."""
    rows = []
    for workload in (with_balance(amoebanet(), stages), transformer()):
        always, never = (
            gpipe(workload, stages, chunks, mode, mode, **PAPERS) for mode in ("always", "never")
        )
        results = take_turns([always, never], rounds=5, steps=2)
        long, short = (results[mode].median_s for mode in ("always", "never"))
        row = [workload.name, f"{1e3 * long:.0f}", f"{1e3 * short:.0f}", f"{1 - short / long:.0%}"]
        rows.append(row)
    return Table(["", "recomputed, ms", "kept, ms", "recomputes take"], rows)
