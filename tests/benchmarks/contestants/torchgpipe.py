"""torchgpipe: one process, a partition for each device."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.optim import SGD

from tests.benchmarks.contestants.lightning import LR
from tests.benchmarks.turns import Contestant, Turn
from tests.benchmarks.workloads import Workload, notes


def torchgpipe(workload: Workload, stages: int, chunks: int, checkpoint: str) -> Contestant:
    """On CPUs its partitions share one device, and so one thread."""
    return Contestant("torchgpipe", partial(_run, workload, stages, chunks, checkpoint), 1)


def _run(workload: Workload, stages: int, chunks: int, checkpoint: str, turn: Turn) -> None:
    from torchgpipe import GPipe

    turn.notes.append(notes)
    model = GPipe(
        nn.Sequential(*workload.layers()),
        balance=[*workload.balance(stages)],
        devices=["cpu"] * stages,
        chunks=chunks,
        checkpoint=checkpoint,
    )
    optimizer = SGD(model.parameters(), lr=LR)
    x, target = workload.batch(chunks)
    for steps in turn.rounds():
        for _ in range(steps):
            optimizer.zero_grad()
            workload.loss(model(x), target).backward()
            optimizer.step()
