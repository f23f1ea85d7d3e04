"""The strict backend: what is right passes, and every planted mistake is told."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_ranks
from tests.strict import backend


@contextmanager
def group(ranks: int) -> Iterator[Any]:
    made = dist.new_group(list(range(ranks)), timedelta(seconds=30), backend.NAME)
    yield made
    made.abort()


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def right(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        total = torch.full((3,), rank + 1.0)
        dist.all_reduce(total, group=strict)
        parts = [torch.zeros(2, dtype=torch.bfloat16) for _ in range(ranks)]
        dist.all_gather(parts, torch.full((2,), rank, dtype=torch.bfloat16), group=strict)
        shared = torch.tensor([True, rank == 0])
        dist.broadcast(shared, 0, strict)
        value = torch.tensor([4.0])
        if rank == 0:
            wait(dist.isend(value, 1, strict), dist.isend(torch.ones(0), 1, strict))
        else:
            received = torch.zeros(1)
            work = dist.irecv(received, 0, strict)
            if not received.isnan():
                raise AssertionError("what is received is there only after wait()")
            wait(work, dist.irecv(torch.ones(0), 0, strict))
            value = received
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), process_group=strict)
        for _ in range(2):
            model(torch.full((1, 2), float(rank))).sum().backward()
        gradient = model.module.weight.grad
        dist.barrier(strict)
    found = (total, torch.stack(parts).sum(), shared.all(), value, gradient)
    if [f.sum().item() for f in found] != [9.0, 2.0, 1, 4.0, 2.0]:
        raise AssertionError(f"wrong results: {found}")


def reused_buffer(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        data = torch.ones(3)
        if rank == 0:
            work = dist.isend(data, 1, strict)
            data.add_(1)
            wait(work)
        else:
            wait(dist.irecv(data, 0, strict))


def written_while_received(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        data = torch.ones(3)
        work = dist.isend(data, 1, strict) if rank == 0 else dist.irecv(data, 0, strict)
        if rank == 1:
            data.zero_()
        wait(work)


def missing_wait(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        if rank == 0:
            wait(dist.isend(torch.ones(3), 1, strict))
        else:
            dist.irecv(torch.ones(3), 0, strict)
            time.sleep(0.5)
            gc.collect()


def read_too_early(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        data = torch.ones(3)
        if rank == 0:
            wait(dist.isend(data, 1, strict))
        else:
            work = dist.irecv(data, 0, strict)
            doubled = 2 * data
            wait(work)
            if doubled.isnan().any():
                backend.breach("what was read too early is NaN")


def swapped_order(rank: int, ranks: int) -> None:
    """Both send first: in one queue neither gets to its receive."""
    with group(ranks) as strict:
        data = torch.ones(3)
        wait(dist.isend(data, 1 - rank, strict), dist.irecv(torch.ones(3), 1 - rank, strict))


def crossed_groups(rank: int, ranks: int) -> None:
    """Two groups, in another order on each rank: right if each has a queue and the host goes on."""
    with group(ranks) as first, group(ranks) as second:
        out, into = (first, second) if rank == 0 else (second, first)
        wait(dist.isend(torch.ones(3), 1 - rank, out), dist.irecv(torch.ones(3), 1 - rank, into))


def other_size(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        if rank == 0:
            wait(dist.isend(torch.ones(3), 1, strict))
        else:
            wait(dist.irecv(torch.ones(2), 0, strict))


def other_collective(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=strict)
        else:
            dist.broadcast(torch.ones(3), 0, strict)


def triangle(rank: int, ranks: int) -> None:
    """Rank 1 receives from 2 before it sends to 0, which 2 waits for: right only between pairs."""
    with group(ranks) as strict:
        around(rank, strict)


def connected_triangle(rank: int, ranks: int) -> None:
    with group(ranks) as strict:
        for low, high in ((0, 1), (0, 2), (1, 2)):
            if rank == low:
                wait(dist.isend(torch.ones(1), high, strict))
            elif rank == high:
                wait(dist.irecv(torch.ones(1), low, strict))
        around(rank, strict)


def around(rank: int, strict: Any) -> None:
    if rank == 0:
        wait(dist.irecv(torch.ones(3), 1, strict))
        wait(dist.isend(torch.ones(3), 2, strict))
    elif rank == 1:
        works = dist.irecv(torch.ones(3), 2, strict), dist.isend(torch.ones(3), 0, strict)
        wait(*works)
    else:
        wait(dist.irecv(torch.ones(3), 0, strict))
        wait(dist.isend(torch.ones(3), 1, strict))


def outcome(case: Callable[[int, int], None], mode: str, deadline_s: float) -> list[str]:
    """What the backend says of a case on this rank."""
    backend.register(backend.Rules.of(mode, deadline_s))
    try:
        case(dist.get_rank(), dist.get_world_size())
    except (backend.StrictError, backend.Aborted, RuntimeError) as error:
        if not backend.violations and isinstance(error, backend.StrictError):
            raise
    return list(backend.violations)


CASES: list[tuple[Callable[[int, int], None], int, str, str | None]] = [
    (right, 2, "group:async", None),
    (right, 2, "device:block", None),
    (right, 2, "pair:first", None),
    (reused_buffer, 2, "group:async", "memory was changed while it was sent"),
    (written_while_received, 2, "group:async", "memory was written to while it was received into"),
    (missing_wait, 2, "group:async", r"dropped without wait\(\)"),
    (read_too_early, 2, "group:async", "what was read too early is NaN"),
    (other_size, 2, "group:async", "send 1 of 12 bytes meets receive 1 of 8 bytes"),
    (other_collective, 2, "group:async", "ranks run different collectives"),
    (swapped_order, 2, "group:async", "deadlock"),
    (crossed_groups, 2, "group:async", None),
    (crossed_groups, 2, "device:async", "deadlock"),
    (crossed_groups, 2, "group:first", "deadlock"),
    (triangle, 3, "group:async", "deadlock"),
    (triangle, 3, "pair:async", "deadlock: . does not connect"),
    (connected_triangle, 3, "pair:async", None),
]


@pytest.mark.parametrize(
    ("case", "ranks", "mode", "told"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2]}" for case in CASES],
)
def test_what_is_right_passes_and_every_mistake_is_told(
    case: Callable[[int, int], None], ranks: int, mode: str, told: str | None
) -> None:
    by_rank = run_ranks(outcome, ranks, case, mode, 1.0 if told else 30.0)
    found = "\n".join(text for texts in by_rank for text in texts)
    assert re.search(told, found) if told else not found, found
