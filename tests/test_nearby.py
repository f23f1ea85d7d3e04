"""Messages between processes of one machine."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm import meeting, nearby
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.nearby import Nearby
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SIZES = (1, 4095, 4096, 4097, 300_000, 3_000_000)


@contextmanager
def connected(timeout_s: float = 30.0) -> Iterator[Nearby]:
    """This rank's connections."""
    found = Nearby(
        dist.get_rank(), [dist.new_group(backend="gloo", timeout=timedelta(seconds=30))], timeout_s
    )
    try:
        yield found
    finally:
        found.close()


def payload(seed: int, nbytes: int) -> Tensor:
    """Bytes that tell a message from others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def exchange(seed: int) -> list[str]:
    """Send and receive at random, under three keys, with receives before and after their sends."""
    rank, choose = dist.get_rank(), random.Random(seed)
    world, wrong = range(dist.get_world_size()), []
    messages = [  # the same on every rank: source, target, key, bytes
        (source, target, choose.randrange(3), choose.choice(SIZES))
        for source, target in [(s, t) for s in world for t in world if s != t]
        for _ in range(40)
    ]
    choose.seed(rank)
    to_send = deque(i for i, message in enumerate(messages) if message[0] == rank)
    to_receive = deque(i for i, message in enumerate(messages) if message[1] == rank)
    with connected() as near:
        sent, expected = [], []
        while to_send or to_receive:
            if to_send and (choose.random() < 0.5 or not to_receive):
                i = to_send.popleft()
                _, target, key, size = messages[i]
                data = payload(i, size)
                sent.append(near.send(target, key, data))
                data.zero_()  # its memory is free at once
            else:
                i = to_receive.popleft()
                source, _, key, size = messages[i]
                data = torch.empty(size, dtype=torch.uint8)
                expected.append((i, data, near.receive(source, key, data)))
        choose.shuffle(expected)
        for i, data, transfer in expected:
            transfer.wait()
            if not torch.equal(data, payload(i, messages[i][3])):
                wrong.append(f"message {i}, {messages[i][3]} bytes")
        for one in sent:
            if one is not None:
                one.wait()
        dist.barrier()
    return wrong


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_in_order_whenever_they_are_sent_and_expected(seed: int) -> None:
    assert run_ranks(exchange, 4, seed) == [[]] * 4


def flood() -> bool:
    """Send far more than a connection has room for, both ways, before anyone receives."""
    other, count = 1 - dist.get_rank(), 5000
    with connected() as near:
        for i in range(count):
            near.send(other, 1, torch.full((1000,), i % 256, dtype=torch.uint8))
        found = torch.empty(1000, dtype=torch.uint8)
        right = True
        for i in range(count):
            near.receive(other, 1, found).wait()
            right = right and bool((found == i % 256).all())
        dist.barrier()
    return right


def test_a_connection_without_room_blocks_nobody() -> None:
    assert run_ranks(flood, 2) == [True, True]


def reuse() -> tuple[int, int, int]:
    """Bytes of shared memory after messages of one size, of many, and of one again."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    found = []
    with connected() as near:
        for sizes in [100_000] * 50, range(10_000, 500_000, 10_000), [100_000] * 50:
            for size in sizes:
                data = torch.zeros(size, dtype=torch.uint8)
                transfers = [
                    near.receive(other, 1, torch.empty_like(data)),
                    near.send(other, 1, data),
                ]
                for transfer in transfers[:: 1 if rank else -1]:
                    assert transfer is not None
                    transfer.wait()
            found.append(near.nbytes)
        dist.barrier()
    return found[0], found[1], found[2]


def test_memory_of_messages_is_used_again() -> None:
    for same, many, again in run_ranks(reuse, 2):
        assert same == 102_400
        assert again == many < 2_200_000  # of what many sizes took, some is kept


def backlog() -> tuple[int, int]:
    """Bytes of shared memory while many messages wait for their receiver, and afterwards."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    with connected() as near:
        parts = [torch.zeros(300_000, dtype=torch.uint8) for _ in range(20)]
        if rank:
            dist.barrier()
            for part in parts:
                near.receive(other, 1, part).wait()
            most = 0
        else:
            sent = [near.send(other, 1, part) for part in parts]
            most = near.nbytes
            dist.barrier()
            for transfer in sent:
                assert transfer is not None
                transfer.wait()
        dist.barrier()
        return most, near.nbytes


def test_memory_of_a_backlog_is_given_back() -> None:
    (most, after), receivers = run_ranks(backlog, 2)
    assert most >= 20 * 300_000
    assert 300_000 <= after <= 1 << 20
    assert receivers == (0, 0)


def all_types() -> list[bool]:
    rank, found = dist.get_rank(), []
    with connected() as near:
        for dtype in torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64:
            for shape in (), (3, 5), (2000, 4):
                value = torch.arange(8000).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
                if rank == 0:
                    near.send(1, 7, value.requires_grad_(value.is_floating_point()))
                else:
                    data = torch.empty(shape, dtype=dtype)
                    near.receive(0, 7, data).wait()
                    found.append(torch.equal(data, value))
        dist.barrier()
    return found


def test_values_of_any_type_and_shape_arrive() -> None:
    assert run_ranks(all_types, 2)[1] == [True] * 15


def refused() -> list[str]:
    """What is said of data that can't be sent, and of messages of another length than expected."""
    rank, said = dist.get_rank(), []
    with connected() as near:
        for data in torch.zeros(4, 4).T, torch.zeros(3, device="meta"):
            with pytest.raises(ValueError, match="contiguous and in host memory"):
                near.send(1 - rank, 1, data)
        near.send(1 - rank, 1, torch.zeros(5))
        try:
            near.receive(1 - rank, 1, torch.zeros(6)).wait()
        except RuntimeError as error:
            said.append(str(error))
        dist.barrier()
    return said


def test_a_message_of_another_length_is_an_error() -> None:
    text = "Rank 1 has sent 20 bytes where rank 0 expects 24: the two do not run the same step."
    assert run_ranks(refused, 2)[0] == [text]


def ends(how: str) -> tuple[str, float]:
    """What rank 0 hears, and after which time, where rank 1 doesn't send what it waits for."""
    with connected(timeout_s=1.0 if how == "late" else 30.0) as near:
        dist.barrier()
        if dist.get_rank() == 1:
            if how == "closed":
                near.send(0, 1, torch.zeros(3000))  # is still read
                near.close()
            else:
                time.sleep(2)
            return "", 0.0
        if how == "aborted":
            threading.Timer(0.2, near.abort).start()
        start = time.monotonic()
        if how == "closed":
            near.receive(1, 1, torch.empty(3000)).wait()
        with pytest.raises(dist.DistBackendError) as error:
            near.receive(1, 1, torch.empty(3000)).wait()
        return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("how", ["closed", "aborted", "late"])
def test_every_wait_has_an_end(how: str) -> None:
    text, took = run_ranks(ends, 2, how)[0]
    assert took < 1.9
    assert ("has waited 1 s for rank 1" if how == "late" else "which has left the run") in text


def unread() -> bool:
    """Whether what was sent before it closed arrives from who has not read what it got."""
    rank = dist.get_rank()
    with connected() as near:
        data = torch.full((3000,), float(rank))
        near.send(1 - rank, 1, data)
        dist.barrier()
        if rank == 1:
            near.close()
        dist.barrier()
        if rank == 0:
            near.receive(1, 1, data).wait()
        return bool((data == 1).all())


def test_what_was_sent_before_the_end_arrives() -> None:
    assert run_ranks(unread, 2) == [True, True]


def in_threads() -> tuple[list[float], float]:
    """What two threads receive that wait at the same time, and how long it took."""
    rank, start = dist.get_rank(), time.monotonic()
    with connected() as near:
        found = [torch.zeros(3000) for _ in range(8)]
        if rank == 1:
            for key in reversed(range(8)):
                time.sleep(0.05)
                near.send(0, key, torch.full((3000,), float(key)))
        else:

            def receive(keys: range) -> None:
                for key in keys:
                    near.receive(1, key, found[key]).wait()

            threads = [threading.Thread(target=receive, args=(range(i, 8, 2),)) for i in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        dist.barrier()
        return [float(values[0]) for values in found], time.monotonic() - start


def test_two_threads_may_wait() -> None:
    found, took = run_ranks(in_threads, 2)[0]
    assert found == [float(key) for key in range(8)]
    assert took < 10


def in_a_child() -> float:
    """How long rank 0 waits for rank 1, which leaves, while a child that it has forked lives on."""
    with connected() as near:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(5,))
        if dist.get_rank() == 1:
            child.start()
        dist.barrier()
        if dist.get_rank() == 1:
            near.close()
            dist.barrier()
            child.terminate()
            return 0.0
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            near.receive(1, 1, torch.empty(3)).wait()
        took = time.monotonic() - start
        dist.barrier()
        return took


def test_a_forked_child_keeps_no_connection_open() -> None:
    assert run_ranks(in_a_child, 2)[0] < 2


def strangers() -> tuple[int, bool]:
    """Meet while another process says the wrong thing, or nothing, at every socket."""
    asked, sockets = meeting._ask, []

    def ask(rank: int, memory: int, address: bytes, secret: bytes) -> Any:
        for said in b"", b"short", b"\0" * 24, secrets.token_bytes(24):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address)
            if said:
                socket.send_fds(stranger, [said], [memory])
            sockets.append(stranger)
            if not said:
                stranger.close()
        return asked(rank, memory, address, secret)

    with mock.patch.object(meeting, "_ask", ask), connected() as near:
        data = torch.full((9000,), dist.get_rank())
        near.send(1 - dist.get_rank(), 1, data)
        near.receive(1 - dist.get_rank(), 1, data).wait()
        dist.barrier()
        return int(data[0]), len(near._peers) == 1


def test_strangers_are_not_let_in() -> None:
    assert run_ranks(strangers, 2) == [(1, True), (0, True)]


def over_groups(where: str) -> list[float]:
    """Talk as a pipeline does, where none, some or all of the others are nearby."""
    rank = dist.get_rank()
    reach = nearby.meet

    def meet(*args: Any) -> Any:
        found = reach(*args)
        return {r: c for r, c in found.items() if where == "all" or r // 2 == rank // 2}

    with (
        mock.patch.object(
            os, "memfd_create", side_effect=OSError if where == "none" else os.memfd_create
        ),
        mock.patch.object(nearby, "meet", meet),
    ):
        groups = Groups.connect(4, 1, "gloo", CPU, timedelta(seconds=30))
    near = [other in groups.nearby for other in range(4)]
    wanted = {"none": set(), "some": {rank ^ 1}, "all": {*range(4)} - {rank}}[where]
    assert {other for other, is_near in enumerate(near) if is_near} == wanted
    value = {"large": torch.arange(300_000.0), "small": 3.0}
    told = groups.pipeline.broadcast("batch", value if rank == 1 else None, source=1)
    total = groups.pipeline.all_reduce(torch.tensor([1.0 * rank]))
    if rank == 0:
        groups.pipeline.send("weights", torch.arange(5e6), to=3)
        found = 0.0
    else:
        found = float(groups.pipeline.receive("weights", 0).sum()) if rank == 3 else 0.0
    groups.close()
    return [float(told["large"].sum()), float(total), found]


@pytest.mark.parametrize("where", ["none", "some", "all"])
def test_who_is_not_nearby_uses_the_process_group(where: str) -> None:
    expected = [float(torch.arange(300_000.0).sum()), 6.0, 0.0]
    found = run_ranks(over_groups, 4, where)
    assert found[:3] == [expected] * 3
    assert found[3] == [*expected[:2], float(torch.arange(5e6).sum())]


def with_small_files() -> tuple[bool, float]:
    """Send more than a file may hold, as after ``ulimit -f``; memory of one's own is one, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        groups = Groups.connect(2, 1, "gloo", CPU, timedelta(seconds=30))
        value = torch.arange(300_000.0) if dist.get_rank() == 1 else None
        told = groups.pipeline.broadcast("batch", value, source=1)
        is_near = 1 - dist.get_rank() in groups.nearby
        groups.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return is_near, float(told.sum())


def test_where_files_have_a_limit_messages_have_none() -> None:
    assert run_ranks(with_small_files, 2) == [(False, float(torch.arange(300_000.0).sum()))] * 2


def files() -> list[int]:
    """Files of connections that are open before, during and after a meeting."""
    found = []

    def count() -> None:
        unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
        names = [os.readlink(f"/proc/self/fd/{file.name}") for file in ours() if file.is_symlink()]
        found.append(sum("memfd:lightning-gpipe" in name or name[8:-1] in unix for name in names))

    def ours() -> list[Path]:
        return list(Path("/proc/self/fd").iterdir())

    count()
    with connected() as near:
        near.send(1 - dist.get_rank(), 1, torch.zeros(9000))
        dist.barrier()
        count()
    gc.collect()
    count()
    return found


def test_nothing_stays_open() -> None:
    for before, meanwhile, after in run_ranks(files, 2):
        assert meanwhile == before + 3  # a connection, and the memory of both
        assert after == before
