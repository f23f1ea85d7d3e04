"""Schedules on emulated devices: steps against the bound of fill-drain, and other packages.

Every stage sleeps 5 ms forward, and 5 ms each for the gradients of its input and of its weights, or
as long as ``--unit`` says, so that any number of stages runs truly in parallel on few cores. What
processes do beside that, they do on these cores all together. How long a sleep really takes, is
measured by ``ideal`` in the same run: stages without messages. The bound is the length that the
schedule's simulator finds for these times. A schedule with two stages on each rank has layers of
half the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tests.benchmarks.bound import Bound
from tests.benchmarks.contestants.deepspeed import deepspeed
from tests.benchmarks.contestants.lightning import gpipe
from tests.benchmarks.contestants.plain import ideal
from tests.benchmarks.contestants.torch_pipelining import VIRTUAL, torch_pipelining
from tests.benchmarks.report import Table
from tests.benchmarks.turns import Contestant, launches_of, median, take_turns
from tests.benchmarks.workloads import emulated

OURS, SEARCHED = "lightning-gpipe, fill_drain", "lightning-gpipe, searched"


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    for stages, chunks in arguments.sizes:
        for checkpoint in arguments.checkpoint:
            yield _compare(stages, chunks, checkpoint, arguments)


def is_wrong(tables: list[Table], arguments: argparse.Namespace) -> bool:
    """Whether steps are longer than wanted."""
    shares = [figures for table in tables for name, figures in table.rows if name == OURS]
    return any(isinstance(s, str) or not s[1] >= arguments.at_least for s in shares)


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(int, text.split("x"))),
        nargs="+",
        default=[(4, 8), (4, 32), (8, 32), (16, 64)],
        metavar="KxM",
        help="stages and micro-batches, such as 4x8",
    )
    parser.add_argument("--checkpoint", nargs="+", default=["always", "never"])
    launches_of(parser, 1)
    parser.add_argument(
        "--unit",
        type=float,
        default=5.0,
        metavar="MS",
        help="milliseconds of a stage's forward; default: %(default)g",
    )
    parser.add_argument("--only", nargs="+", help="names of contestants, or parts of them")
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.0,
        help="end with 1 where this package's fill-drain is below that share of the bound",
    )


def _contestants(stages: int, chunks: int, checkpoint: str, unit_s: float) -> list[Contestant]:
    one, two = emulated(stages, unit_s), emulated(2 * stages, unit_s / 2)
    found = [
        ideal(one, stages, chunks, checkpoint),
        gpipe(one, stages, chunks, checkpoint, OURS, schedule="fill_drain"),
    ]
    for virtual, workload in ((1, one), (2, two)):
        found.append(
            gpipe(
                workload,
                stages,
                chunks,
                checkpoint,
                f"{SEARCHED}, V={virtual}",
                schedule="searched",
                virtual_stages=virtual,
                step="micro-batch",
            )
        )
    for schedule, virtual in VIRTUAL.items():
        if schedule == "ZBVZeroBubble" and checkpoint == "always":
            continue  # it computes every stage twice more
        workload = one if virtual == 1 else two
        found.append(torch_pipelining(workload, stages, chunks, checkpoint, schedule))
    return [*found, deepspeed(one, stages, chunks, checkpoint)]


def _compare(stages: int, chunks: int, checkpoint: str, arguments: argparse.Namespace) -> Table:
    contestants = [
        c
        for c in _contestants(stages, chunks, checkpoint, arguments.unit / 1e3)
        if c.name == "ideal" or not arguments.only or any(n in c.name for n in arguments.only)
    ]
    # the schedule is searched for when six mini-batches were measured
    results = take_turns(
        contestants, arguments.rounds, arguments.steps, warm_up=6, launches=arguments.launches
    )
    bound = Bound(results["ideal"], stages, chunks, checkpoint)
    table = Table(
        f"Emulated devices of {arguments.unit:g} ms, K={stages}, M={chunks}, {checkpoint}",
        ["step, ms", "of the bound"],
        [("bound of fill-drain", [1e3 * bound.median_s, 1.0])],
    )
    for name, result in results.items():
        figures = [1e3 * result.median_s, median(bound.reached(result))]
        table.rows.append((name, result.error or figures))
    return table
