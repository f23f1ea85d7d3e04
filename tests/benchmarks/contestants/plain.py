"""Without a pipeline: one process, replicas, and the stages side by side without messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint as checkpointed

from tests.benchmarks.contestants.lightning import LR
from tests.benchmarks.turns import Contestant, Turn
from tests.benchmarks.workloads import Workload, notes, timed


def ideal(workload: Workload, stages: int, chunks: int, checkpoint: str) -> Contestant:
    """Every stage by itself, on inputs that it has already: no messages, no waiting."""
    run = partial(_ideal, workload, stages, chunks, checkpoint)
    return Contestant("ideal", run, stages)


def accumulation(workload: Workload, stages: int, chunks: int, checkpoint: str) -> Contestant:
    """One process that accumulates over micro-batches, with a checkpoint around each stage."""
    run = partial(_accumulate, workload, stages, chunks, checkpoint)
    return Contestant("one process", run, 1)


def replicas(workload: Workload, count: int, chunks: int, sharded: bool) -> Contestant:
    """The whole model on each process, or shards of it, and a part of the mini-batch."""
    run = partial(_replicas, workload, chunks, sharded)
    return Contestant("FSDP" if sharded else "DDP", run, count)


def _ideal(workload: Workload, stages: int, chunks: int, checkpoint: str, turn: Turn) -> None:
    turn.notes.append(notes)
    pieces = workload.stages(stages)
    parts, targets = _parts(workload, chunks)
    with torch.no_grad():
        for piece in pieces[: turn.rank]:
            parts = [piece(part) for part in parts]
    own, is_last = pieces[turn.rank], turn.rank == stages - 1
    del pieces
    inputs = [_detached(part, turn.rank > 0) for part in parts]
    optimizer = SGD(own.parameters(), lr=LR)
    for steps in turn.rounds():
        for _ in range(steps):
            optimizer.zero_grad()
            kept = []
            for x in inputs:
                with timed("F"), torch.set_grad_enabled(checkpoint == "never"):
                    kept.append(own(x))
            while kept:
                m = len(kept) - 1
                y = kept.pop()
                if checkpoint == "always":
                    del y
                    with timed("R"):
                        y = own(inputs[m])
                with timed("B"):
                    if is_last:
                        (workload.loss(y, targets[m]) / chunks).backward()
                    else:
                        _tensors_backward(y)
            optimizer.step()


def _accumulate(workload: Workload, stages: int, chunks: int, checkpoint: str, turn: Turn) -> None:
    turn.notes.append(notes)
    pieces = workload.stages(stages)
    parts, targets = _parts(workload, chunks)
    optimizer = SGD([p for piece in pieces for p in piece.parameters()], lr=LR)
    for steps in turn.rounds():
        for _ in range(steps):
            optimizer.zero_grad()
            for x, target in zip(parts, targets, strict=True):
                value = x
                for piece in pieces:
                    value = _run(piece, value, checkpoint)
                (workload.loss(value, target) / chunks).backward()
            optimizer.step()


def _replicas(workload: Workload, chunks: int, sharded: bool, turn: Turn) -> None:
    turn.notes.append(notes)
    dist.init_process_group("gloo")
    layers = workload.layers()
    model: nn.Module
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        model = nn.Sequential(*layers)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    x, target = (t.chunk(turn.world_size)[turn.rank] for t in workload.batch(chunks))
    optimizer = SGD(model.parameters(), lr=LR)
    for steps in turn.rounds():
        for _ in range(steps):
            optimizer.zero_grad()
            workload.loss(model(x), target).backward()
            optimizer.step()


def _run(piece: nn.Module, value: Any, checkpoint: str) -> Any:
    if checkpoint == "never":
        return piece(value)
    return checkpointed(piece, value, use_reentrant=False)


def _parts(workload: Workload, chunks: int) -> tuple[list[Any], list[Tensor]]:
    x, target = workload.batch(chunks)
    return list(x.chunk(chunks)), list(target.chunk(chunks))


def _detached(value: Any, wants: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(part, wants) for part in value)
    return value.detach().requires_grad_(wants and value.is_floating_point())


def _tensors_backward(y: Any) -> None:
    outputs = y if isinstance(y, tuple) else (y,)
    torch.autograd.backward(outputs, [torch.full_like(t, 1e-3) for t in outputs])
