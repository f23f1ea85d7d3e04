"""Tensors stay where they belong, whatever the user's default device, and the host doesn't wait."""

from __future__ import annotations

import ast
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import _device_constructors

import lightning_gpipe
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm import p2p, packing
from lightning_gpipe.comm.channel import Channel
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.ranks import run_ranks
from tests.strict import backend
from tests.training import train


def gloo() -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=30))


def test_factory_calls_name_their_device() -> None:
    """``torch.set_default_device("cuda")`` would put host memory on the GPU."""
    factories = {f.__name__ for f in _device_constructors()}
    found = []
    for path in Path(lightning_gpipe.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr in factories) == ("torch", True)
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                found.append(f"{path.name}:{node.lineno} torch.{node.func.attr}")
    assert found == []


def talk() -> bool:
    """Say and send everything under a default device that holds no values."""
    rank, cpu, groups = dist.get_rank(), torch.device("cpu"), [gloo(), gloo()]
    objects = ObjectChannel("stage", rank, (0, 1), cpu, (groups[0], groups[0]))
    channel = Channel(1 - rank, 1 - rank, *groups, cpu, through_host=True)
    sender, receiver = p2p.Sender(channel), p2p.Receiver(channel)
    value = {"text": 20_000 * "long ", "large": torch.arange(9000.0), "small": torch.arange(3)}
    with torch.device("meta"):
        found = [objects.broadcast("batch", value, source=0)]
        if rank == 0:
            objects.send("state dict", value, to=1)
        else:
            found.append(objects.receive("state dict", source=0))
        for size in (3, 3, 3, 9000, 9000, 9000):
            part = value["large"][:size]
            if rank == 0:
                sender.send(0, Tree.of(part, "It"), [True], training=True)
            else:
                receiver.expect([0], training=True)
                found.append({**value, "large": receiver.take(0)[0].value()})
        sender.flush()
        objects.flush()
        everyone = objects.gather("clock", rank)
    large = [item["large"] for item in found]
    right = all(torch.equal(part, value["large"][: len(part)]) for part in large)
    return right and everyone == [0, 1] and len(found[0]["text"]) == 100_000


def test_a_default_device_does_not_move_messages() -> None:
    assert run_ranks(talk, 2) == [True, True]


def cross() -> list[Any]:
    """Send a device's tensor and lengths in host memory; "meta" stands for the device."""
    to_bytes, rank, groups = strides.to_bytes, dist.get_rank(), [gloo(), gloo()]
    channel = Channel(1 - rank, 1 - rank, *groups, torch.device("meta"), through_host=True)
    arrived: list[Any] = []

    def readable(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.nbytes, dtype=torch.uint8) if tensor.is_meta else to_bytes(tensor)

    strides.to_bytes = readable  # a meta tensor has no bytes
    try:
        sender, receiver = p2p.Sender(channel), p2p.Receiver(channel)
        for samples in (2, 2, 2, 2, 3, 20_000, 20_000, 20_000):  # small, larger, no header's
            value = torch.ones(samples, 3, device="meta"), torch.arange(samples), None
            if rank == 0:
                sender.send(0, Tree.of(value, "It"), [False] * 3, training=True)
            else:
                receiver.expect([0], training=True)
                hidden, lengths, _ = receiver.take(0)[0].value()
                right = lengths.device.type == "cpu" and torch.equal(lengths, value[1])
                arrived.append((hidden.device.type, tuple(hidden.shape), right))
        sender.flush()
    finally:
        strides.to_bytes = to_bytes
    dist.barrier(groups[0])
    return arrived


def test_tensors_in_host_memory_stay_there_when_they_cross_a_boundary() -> None:
    """``pack_padded_sequence`` wants its lengths there."""
    sizes = (2, 2, 2, 2, 3, 20_000, 20_000, 20_000)
    assert run_ranks(cross, 2)[1] == [("meta", (samples, 3), True) for samples in sizes]


def test_small_tensors_of_a_device_are_not_pickled() -> None:
    """Not even where they travel through host memory: they must arrive on the device."""
    host, device = torch.arange(3), torch.ones(3, device="meta")
    blob, apart = packing.pack((host, device), True)
    assert [one is device for one in apart] == [True]
    again, other = packing.unpack(
        blob, lambda length, kind: torch.empty(length, dtype=torch.uint8, device=kind)
    )
    assert torch.equal(again, host)
    assert (other.device, other.shape) == (device.device, device.shape)


def alternate() -> int:
    """Train and validate by turns; count what goes another way than foreseen."""
    rank, groups, beside = dist.get_rank(), [gloo(), gloo()], 0
    channel = Channel(1 - rank, 1 - rank, *groups, torch.device("cpu"), through_host=False)
    sender, receiver = p2p.Sender(channel), p2p.Receiver(channel)
    post = p2p.Receiver._post_beside

    def counted(self: p2p.Receiver, nbytes: int) -> Any:
        nonlocal beside
        beside += 1
        return post(self, nbytes)

    p2p.Receiver._post_beside = counted  # type: ignore[method-assign]
    try:
        for step in range(8):
            training = step % 4 < 2
            value = Tree.of(torch.ones(4 if training else 6, 3), "It")
            if rank == 0:
                sender.send(0, value, [training], training)
            else:
                receiver.expect([0], training)
                receiver.take(0)
        sender.flush()
    finally:
        p2p.Receiver._post_beside = post  # type: ignore[method-assign]
    dist.barrier(groups[0])
    return beside


def test_a_change_between_training_and_validation_is_foreseen() -> None:
    assert run_ranks(alternate, 2)[1] == 2, "the first signature of each, and none at a change"


def pending() -> int:
    """How much of a large output its source holds on to after the broadcast."""
    backend.register(backend.Rules.of("group:block"))
    ranks, device = tuple(range(dist.get_world_size())), torch.device("cpu")
    groups = gloo(), dist.new_group(backend=backend.NAME, timeout=timedelta(seconds=30))
    channel = ObjectChannel("stage", dist.get_rank(), ranks, device, groups)
    values = torch.ones(100_000), torch.ones(0, 3)
    output, empty = channel.broadcast("output", values, source=1)
    if output.sum() != 100_000 or empty.shape != (0, 3):
        raise AssertionError("the output came back changed")
    held = sum(nbytes for _, nbytes, _ in channel._pending)
    channel.flush()
    dist.barrier(groups[0])
    return held


def test_no_copy_of_the_output_lives_on_after_its_broadcast() -> None:
    assert max(run_ranks(pending, 2)) < 100_000


def changed_at_once() -> list[float]:
    """What arrives of a small and a large tensor that their source changes after the broadcast."""
    rank, group = dist.get_rank(), gloo()
    channel = ObjectChannel("stage", rank, tuple(range(4)), torch.device("cpu"), (group, group))
    values = torch.ones(1000), torch.ones(1_000_000)
    time.sleep(0.3 * rank)  # the last rank gets it from another that has changed it meanwhile
    found = channel.broadcast("output", values if rank == 0 else None, source=0)
    sums = [float(value.sum()) for value in found]
    for value in found:
        value.zero_()
    channel.flush()
    dist.barrier(group)
    return sums


def test_a_change_after_a_broadcast_reaches_nobody() -> None:
    assert run_ranks(changed_at_once, 4) == [[1000.0, 1_000_000.0]] * 4


class Marked(Tensor):
    """A tensor with a word."""

    word = ""


def subclasses() -> tuple[str, str, list[float], bool]:
    rank, group = dist.get_rank(), gloo()
    channel = ObjectChannel("stage", rank, (0, 1), torch.device("cpu"), (group, group))
    value = torch.arange(3000.0).as_subclass(Marked)
    value.word = "kept"
    arrived, again = channel.broadcast("batch", [value, value], source=0)
    channel.flush()
    return type(arrived).__name__, arrived.word, arrived[:3].tolist(), arrived is again


def test_subclasses_of_tensors_arrive_whole_on_the_receivers_device() -> None:
    assert run_ranks(subclasses, 2) == [("Marked", "kept", [0.0, 1.0, 2.0], True)] * 2


SEEN: list[tuple[bool, bool]] = []
see = SEEN.append  # in a list that layers name a recompute leaves no trace


class ChoosesKernels(models.Module):
    """Runs the backbone where one kernel of attention, and no other, is allowed."""

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.deterministic
            if x.device.type != "meta":  # where layers tell what they do with a batch
                see(flags)
            return x

    def build(self) -> None:
        super().build()
        self.backbone.append(self.Watch())

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(deterministic=True):
            output: Tensor = self.backbone(x)
        return output


def watch() -> tuple[set[tuple[bool, bool]], int, bool]:
    SEEN.clear()
    strategy = GPipeStrategy(2, checkpoint="always", balance="params")
    train(ChoosesKernels(), max_steps=1, devices=1, strategy=strategy)
    return set(SEEN), len(SEEN), torch.backends.cuda.flash_sdp_enabled()


def test_a_recompute_chooses_among_the_forwards_kernels() -> None:
    """Kernels differ in the last bits, so weights would."""
    # two forwards, two recomputes, and twice for a look at whether layers mix samples
    assert run_ranks(watch, 1) == [({(False, True)}, 6, True)]
