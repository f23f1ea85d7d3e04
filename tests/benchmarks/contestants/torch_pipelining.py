"""torch.distributed.pipelining, as its documentation shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint as checkpointed

from tests.benchmarks.contestants.lightning import LR
from tests.benchmarks.turns import Contestant, Turn
from tests.benchmarks.workloads import Workload, notes

#: Stages of a rank, by schedule.
VIRTUAL = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}


def torch_pipelining(
    workload: Workload, stages: int, chunks: int, checkpoint: str, schedule: str
) -> Contestant:
    """One of its schedules; "always" puts a checkpoint around each stage."""
    run = partial(_run, workload, chunks, checkpoint, schedule)
    return Contestant(f"torch {schedule}", run, stages)


class _Checkpointed(nn.Module):
    """A stage that is computed again in its backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpointed(self.inner, *args, use_reentrant=False)


class _Tuples(nn.Module):
    """Takes a tuple's tensors one by one, as they cross the stages."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(args if len(args) > 1 else args[0])


def _run(workload: Workload, chunks: int, checkpoint: str, schedule: str, turn: Turn) -> None:
    turn.notes.append(notes)
    dist.init_process_group("gloo")
    size, virtual = turn.world_size, VIRTUAL[schedule]
    count = size * virtual
    if schedule == "ZBVZeroBubble":
        indices = [turn.rank, count - 1 - turn.rank]
    else:
        indices = [turn.rank + size * v for v in range(virtual)]
    pieces = workload.stages(count)
    own = [_Tuples(pieces[index]) for index in indices]
    del pieces
    wrapped = [_Checkpointed(piece) if checkpoint == "always" else piece for piece in own]
    stages = [
        PipelineStage(piece, index, count, torch.device("cpu"))
        for piece, index in zip(wrapped, indices, strict=True)
    ]
    make = getattr(pipelining, f"Schedule{schedule}")
    runs = make(stages if virtual > 1 else stages[0], chunks, loss_fn=workload.loss)
    optimizer = SGD([p for piece in own for p in piece.parameters()], lr=LR)
    x, target = workload.batch(chunks)
    inputs = (x,) if 0 in indices else ()
    last = {"target": target, "losses": []} if count - 1 in indices else {}
    for steps in turn.rounds():
        for _ in range(steps):
            optimizer.zero_grad()
            runs.step(*inputs, **last)
            optimizer.step()
