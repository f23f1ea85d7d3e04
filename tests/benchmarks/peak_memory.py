"""Peak memory of each process, of this package and others.

The peak of a process's resident memory above what it was before the model was built: weights,
gradients, activations and messages, also those that this package holds beside it. Pages of files
such as libraries don't count. Freed memory goes back at once, so that the peak is of what is held,
not of what the allocator keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tests.benchmarks import compute
from tests.benchmarks.contestants.lightning import gpipe
from tests.benchmarks.contestants.plain import accumulation, ideal
from tests.benchmarks.report import Table
from tests.benchmarks.turns import take_turns
from tests.benchmarks.workloads import with_balance


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the suite's own options."""
    compute.arguments_of(parser)
    parser.add_argument(
        "--warm-up", type=int, default=6, help="rounds before those; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> Iterator[Table]:
    """Run the suite."""
    stages = arguments.stages
    for name in arguments.workloads:
        workload = with_balance(compute.WORKLOADS[name](), stages)
        for chunks in arguments.chunks:
            for checkpoint in arguments.checkpoint:
                least = gpipe(
                    workload,
                    stages,
                    chunks,
                    checkpoint,
                    "lightning-gpipe, micro-batch step, 1f1b",
                    step="micro-batch",
                    schedule="1f1b",
                )
                others = compute.contestants(workload, stages, chunks, checkpoint)
                found = [
                    ideal(workload, stages, chunks, checkpoint),
                    accumulation(workload, stages, chunks, checkpoint),
                    *compute.chosen([*others[:2], least, *others[2:]], arguments.only),
                ]
                results = take_turns(
                    found,
                    arguments.rounds,
                    arguments.steps,
                    warm_up=arguments.warm_up,
                    exact_memory=True,
                )
                table = Table(
                    f"{workload.name}, K={stages}, M={chunks}, {checkpoint}: peak, MB",
                    ["highest", *(f"process {rank}" for rank in range(stages))],
                )
                for who, result in results.items():
                    peaks = result.peak_mb
                    table.rows.append((who, result.error or [max(peaks), *peaks]))
                yield table
