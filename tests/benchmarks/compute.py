"""Real computation on two processes: steps against the bound, and against other packages.

``one process`` accumulates over the micro-batches, with a checkpoint around each stage where
activations are recomputed. ``ideal`` is every stage by itself, side by side: no messages, no
waiting. The bound is the length of fill-drain for what the stages take there. DDP and FSDP run half
of the mini-batch on each process, with the whole model on each. In a turn several mini-batches
follow each other, as in training: schedules that begin the next one before the last has ended win
nothing by it in a turn of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tests.benchmarks.bound import Bound
from tests.benchmarks.contestants.deepspeed import deepspeed
from tests.benchmarks.contestants.lightning import gpipe
from tests.benchmarks.contestants.plain import accumulation, ideal, replicas
from tests.benchmarks.contestants.torch_pipelining import VIRTUAL, torch_pipelining
from tests.benchmarks.contestants.torchgpipe import torchgpipe
from tests.benchmarks.report import Table
from tests.benchmarks.turns import Contestant, launches_of, median, spread, take_turns
from tests.benchmarks.workloads import (
    Workload,
    amoebanet,
    conv_net,
    language_model,
    transformer,
    with_balance,
)

WORKLOADS = {
    "transformer": transformer,
    "conv-net": conv_net,
    "amoebanet": amoebanet,
    "language-model": language_model,
}
ONE = "one process"
_SETTLED = 9  # mini-batches until a measured schedule runs, and steps are rarely looked at


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--chunks", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--checkpoint", nargs="+", default=["always", "never"])
    parser.add_argument("--only", nargs="+", help="names of contestants, or parts of them")
    parser.add_argument("--stages", type=int, default=2)
    launches_of(parser, 3)
    parser.set_defaults(rounds=6, steps=6)


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    for name in arguments.workloads:
        workload = with_balance(WORKLOADS[name](), arguments.stages)
        for chunks in arguments.chunks:
            for checkpoint in arguments.checkpoint:
                yield _compare(workload, chunks, checkpoint, arguments)


def contestants(workload: Workload, stages: int, chunks: int, checkpoint: str) -> list[Contestant]:
    """All that can train a workload, besides the yardsticks."""
    found = [
        gpipe(workload, stages, chunks, checkpoint),
        gpipe(workload, stages, chunks, checkpoint, step="micro-batch"),
    ]
    if len(workload.layers()) >= 2 * stages:
        for step in ("mini-batch", "micro-batch"):
            name = f"lightning-gpipe, {step} step, V=2"
            found.append(
                gpipe(workload, stages, chunks, checkpoint, name, step=step, virtual_stages=2)
            )
    if checkpoint == "always":
        name = "lightning-gpipe, except_last"
        found.append(gpipe(workload, stages, chunks, "except_last", name))
    for schedule, virtual in VIRTUAL.items():
        # zero bubble recomputes every stage twice; a tuple's gradients are not all of its tensors'
        if (schedule == "ZBVZeroBubble" and checkpoint == "always") or (
            virtual > 1 and len(workload.layers()) < 2 * stages
        ):
            continue
        found.append(torch_pipelining(workload, stages, chunks, checkpoint, schedule))
    return [
        *found,
        torchgpipe(workload, stages, chunks, checkpoint),
        deepspeed(workload, stages, chunks, checkpoint),
    ]


def chosen(found: list[Contestant], only: list[str] | None) -> list[Contestant]:
    """Those whose names were asked for."""
    return [c for c in found if not only or any(part in c.name for part in only)]


def _compare(
    workload: Workload, chunks: int, checkpoint: str, arguments: argparse.Namespace
) -> Table:
    stages = arguments.stages
    found = [
        ideal(workload, stages, chunks, checkpoint),
        accumulation(workload, stages, chunks, checkpoint),
        *chosen(
            [
                *contestants(workload, stages, chunks, checkpoint),
                replicas(workload, stages, chunks, sharded=False),
                replicas(workload, stages, chunks, sharded=True),
            ],
            arguments.only,
        ),
    ]
    warm_up = -(-_SETTLED // arguments.steps)
    results = take_turns(
        found, arguments.rounds, arguments.steps, warm_up, launches=arguments.launches
    )
    bound = Bound(results["ideal"], stages, chunks, checkpoint)
    one_s = results[ONE].median_s
    table = Table(
        f"{workload.name}, K={stages}, M={chunks}, {checkpoint}",
        ["step, ms", "speed-up", "of the bound", "spread"],
        [("bound of fill-drain", [1e3 * bound.median_s, one_s / bound.median_s, 1.0])],
    )
    for name, result in results.items():
        step_s, shares = result.median_s, bound.reached(result)
        figures = [1e3 * step_s, one_s / step_s, median(shares), spread(shares)]
        table.rows.append((name, result.error or figures))
    return table
