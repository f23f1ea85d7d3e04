"""What crosses between stages arrives as it was, whatever changes from step to step."""

from __future__ import annotations

import random
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gpipe.comm.channel import Channel
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.comm.p2p import Receiver, Sender
from lightning_gpipe.comm.packet import PacketLayout
from lightning_gpipe.comm.signature import TensorType
from lightning_gpipe.comm.waiting import waiting
from lightning_gpipe.tensors.tree import Tree
from tests.ranks import RankError, run_ranks

LARGE = 40_000  # elements: too many to travel in a header


def sequence(seed: int) -> list[list[Any]]:
    """Calls of several micro-batches; signatures stay for a while, then change."""
    generator = random.Random(seed)
    kinds = [
        lambda: torch.randn(3, 4),
        lambda: torch.randn(LARGE),
        lambda: (
            torch.randn(4, 3).T,
            None,
            torch.randint(9, (5,)),
            torch.ones(3, dtype=torch.bool),
        ),
        lambda: {"a": torch.randn(LARGE).bfloat16(), "b": [torch.randn(2), 3, "text"]},
        lambda: [None, None],
        lambda: torch.randn(0, 3),
        lambda: (
            torch.randn(1),
            torch.ones(1, dtype=torch.bool),
            torch.randn(2, dtype=torch.float64),
        ),
        lambda: [1, True],
        lambda: [True, 1],
    ]
    calls, current = [], [generator.choice(kinds) for _ in range(6)]
    for _ in range(60):
        if generator.random() < 0.3:
            current[generator.randrange(6)] = generator.choice(kinds)
        calls.append([kind() for kind in current[: generator.randint(1, 6)]])
    return calls


def exchange(seed: int) -> None:
    torch.manual_seed(seed)
    calls = sequence(seed)
    rank = dist.get_rank()
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=20)) for _ in range(2)]
    channel = Channel(
        1 - rank, 1 - rank, groups[0], groups[1], torch.device("cpu"), through_host=True
    )
    sender, receiver = Sender(channel), Receiver(channel)
    for call in calls:
        flags = [
            [isinstance(leaf, torch.Tensor) and m % 2 == 0 for leaf in tree(v).leaves]
            for m, v in enumerate(call)
        ]
        if rank == 0:
            for m, value in enumerate(call):
                sender.send(m, tree(value), flags[m], training=True)
        else:
            receiver.expect(range(len(call)), training=True)
            for m, value in enumerate(call):
                arrived, wants = receiver.take(m)
                if wants != flags[m] or arrived.spec != tree(value).spec:
                    raise AssertionError("the signature came back changed")
                for ours, theirs in zip(arrived.leaves, tree(value).leaves, strict=True):
                    if type(ours) is not type(theirs):
                        raise AssertionError(f"{ours} is not {theirs}")
                    if isinstance(theirs, torch.Tensor):
                        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
                        if theirs.numel() and ours.stride() != theirs.stride():
                            raise AssertionError("the strides came back changed")
                    elif ours != theirs:
                        raise AssertionError(f"{ours} is not {theirs}")
    sender.flush()
    dist.barrier(groups[0])
    for group in groups:
        dist.destroy_process_group(group)


def tree(value: Any) -> Tree:
    return Tree.of(value, "The value")


@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_in_order(seed: int) -> None:
    run_ranks(exchange, 2, seed, timeout_s=60)


def waits(is_nearby: bool) -> list[float]:
    """Seconds that taking each of two boundaries takes, and those of them that it waits for."""
    timeout = timedelta(seconds=20)
    groups = Groups.connect(2, 1, "gloo", torch.device("cpu"), timeout)
    channel = groups.channel(1 - groups.stage, 0, "activations")
    if not is_nearby:
        group = groups.pipeline.host
        channel = replace(channel, data=group, headers=group)
    sender, receiver = Sender(channel), Receiver(channel)
    found = []
    receiver.expect(range(2 * groups.stage), training=True)
    for m in range(2):
        if groups.stage == 0:
            time.sleep(0.3)
            sender.send(m, tree(torch.ones(3)), [True], training=True)
        else:
            start, before = time.perf_counter(), waiting.seconds
            receiver.take(m)
            found += [time.perf_counter() - start, waiting.seconds - before]
    sender.flush()
    groups.close()
    return found


@pytest.mark.parametrize("is_nearby", [True, False])
def test_waits_for_messages_are_told_from_work(is_nearby: bool) -> None:
    found = run_ranks(waits, 2, is_nearby, timeout_s=60)[1]
    for took, waited in zip(found[::2], found[1::2], strict=True):
        assert took > 0.15
        assert took - 0.1 < waited <= took


def answer() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=20)) for _ in range(2)]
    channel = Channel(
        1 - rank, 1 - rank, groups[0], groups[1], torch.device("cpu"), through_host=True
    )
    sender = Sender(channel)
    receiver = Receiver(channel, answers=sender)
    if rank == 0:
        sent = [torch.zeros(1 << 20) for _ in range(2)]
        memory = [weakref.ref(tensor.untyped_storage()) for tensor in sent]
        for m in range(2):
            sender.send(m, tree(sent.pop(0)), [True], training=True)
        receiver.expect([0], training=True)
        receiver.take(0)
        if [ref() is None for ref in memory] != [True, False]:
            raise AssertionError("the memory of what was answered must be free, and no other")
    else:
        receiver.expect([0, 1], training=True)
        sender.send(0, receiver.take(0)[0], [False], training=True)
        receiver.take(1)
    sender.flush()
    dist.barrier(groups[0])
    for group in groups:
        dist.destroy_process_group(group)


def test_a_gradient_frees_what_it_answers() -> None:
    run_ranks(answer, 2, timeout_s=60)


def control() -> ObjectChannel:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    ranks = tuple(range(dist.get_world_size()))
    return ObjectChannel("stage", dist.get_rank(), ranks, torch.device("cpu"), (group, group))


def messages() -> Any:
    channel = control()
    shared = torch.arange(3)
    value = {
        "small": shared,
        "again": shared,
        "large": torch.arange(9000.0).view(90, 100).T,
        "text": "x" * 50_000,
    }
    arrived = channel.broadcast("output", value if channel.index == 1 else None, source=1)
    if arrived["small"] is not arrived["again"] or arrived["large"].stride() != (1, 100):
        raise AssertionError("the object came back changed")
    if channel.index == 0:
        channel.send("stage weights", value, to=2)
    elif channel.index == 2:
        torch.testing.assert_close(
            channel.receive("stage weights", source=0)["large"], value["large"]
        )
    channel.flush()
    return sorted(arrived), arrived["large"].sum().item(), len(arrived["text"])


def test_objects_are_broadcast_and_sent() -> None:
    assert (
        run_ranks(messages, 3)
        == [(["again", "large", "small", "text"], 9000 * 8999 / 2, 50_000)] * 3
    )


def mismatch() -> None:
    channel = control()
    channel.broadcast("batch" if channel.index == 0 else "output", 1, source=0)
    channel.flush()


def test_a_message_of_another_kind_is_an_error() -> None:
    with pytest.raises(
        RankError, match=r"expected a message of kind .output. from stage 0 .*, which sent 'batch'"
    ):
        run_ranks(mismatch, 2)


def decide() -> Any:
    return control().decide("partition", lambda: 1 / 0)


def test_a_failed_decision_reaches_every_stage() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(decide, 2)


def test_tensors_of_a_packet_cannot_grow_into_each_other() -> None:
    sent = [torch.randn(3, 4), torch.arange(5), torch.randn(4, 2).T]
    for tensors in sent, sent[:1]:
        packet = PacketLayout(tuple(TensorType.of(t, False) for t in tensors)).packet()
        packet.fill(tensors)
        arrived = packet.tensors(torch.device("cpu"))
        assert [t.stride() for t in arrived] == [t.stride() for t in tensors]
        assert all(map(torch.equal, arrived, tensors))
        places = {t.untyped_storage().data_ptr() for t in arrived}
        assert len(places) == len(tensors)
        is_in_packet = packet.buffer.untyped_storage().data_ptr() in places
        assert is_in_packet == (len(tensors) == 1), "one by itself needs no copy"
