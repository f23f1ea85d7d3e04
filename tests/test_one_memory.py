"""Large batches and outputs, which processes of one machine look at where they lie."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm import messages, shared_memory
from lightning_gpipe.comm.groups import Groups
from tests.ranks import run_ranks
from tests.training import train

CPU = torch.device("cpu")
COUNT = 300_000  # numbers of 4 bytes: more than 1 MiB
MB = 2**20


@contextmanager
def connected(most: int = 64) -> Iterator[Groups]:
    """This rank's groups, where tensors from 1 MiB on are looked at, so many at a time."""
    groups = Groups.connect(dist.get_world_size(), 1, "gloo", CPU, timedelta(seconds=60))
    with (
        mock.patch.object(messages, "_SHARED", MB),
        mock.patch.object(shared_memory, "_MOST_VIEWS", most),
        mock.patch.object(shared_memory, "_KEPT", MB),
    ):
        yield groups
    groups.close()


def given(step: int) -> dict[str, Tensor]:
    """Tensors of some layouts and types."""
    values = torch.arange(COUNT, dtype=torch.float32) + step
    return {
        "plain": values,
        "transposed": values.clone().view(4, -1).T,
        "half": torch.cat([values, values]).bfloat16(),
        "expanded": values.clone()[:, None].expand(-1, 3),
        "small": values[:5].clone(),
    }


def looked_at() -> list[str]:
    """What is wrong with what arrives, now and after others have come."""
    rank, wrong, kept = dist.get_rank(), list[str](), list[Any]()
    with connected() as groups:
        for step in range(4):
            source, own = step % dist.get_world_size(), given(step)
            came = groups.pipeline.broadcast("batch", own if rank == source else None, source)
            own["plain"][:9] = -1.0  # nobody else's
            if rank != source:
                if came["plain"].untyped_storage().resizable():
                    wrong.append(f"{step}: it is a copy")
                came["plain"][rank] = -2.0  # and neither is this
                kept.append((step, came))
        for step, came in kept:
            expected = given(step)
            expected["plain"][rank] = -2.0
            for name, tensor in came.items():
                if not torch.equal(tensor, expected[name]):
                    wrong.append(f"{step}: {name}")
                if tensor.stride() != expected[name].stride():
                    wrong.append(f"{step}: strides of {name}")
    gc.collect()
    return wrong + [f"{s}: later" for s, came in kept if came["plain"][-1] != COUNT - 1 + s]


def test_what_is_looked_at_is_what_was_sent() -> None:
    assert run_ranks(looked_at, 3) == [[], [], []]


def grown() -> tuple[float, float]:
    """MB of what this process shows, at most while batches come, and after others have come."""
    rank, most = dist.get_rank(), 0.0
    with connected() as groups:
        for count in [COUNT] * 8 + [4 * COUNT] * 3 + [COUNT] * 3:
            batch = torch.ones(count) if rank == 0 else None
            came = groups.pipeline.broadcast("batch", batch, 0)
            if float(came[-1]) != 1.0:
                raise AssertionError("the batch came back changed")
            groups.pipeline.all_reduce(torch.zeros(3))
            most = max(most, groups.nearby.nbytes / MB)
        return most, groups.nearby.nbytes / MB


def test_memory_is_used_again() -> None:
    (most, after), *others = run_ranks(grown, 3)
    assert most <= 2 * 4 * 1.2 + 1.2
    assert after <= 3 * 1.2
    assert others == [(0.0, 0.0)] * 2


def retained(most: int) -> list[float]:
    """The last numbers of several batches, of which a number may be looked at."""
    rank = dist.get_rank()
    with connected(most) as groups:
        came = [
            groups.pipeline.broadcast("batch", torch.full((COUNT,), float(i)), 0) for i in range(4)
        ]
        found = [float(tensor[-1]) for tensor in came]
        last = came.pop()
        del came
        again = groups.pipeline.broadcast("batch", last + 1 if rank == 0 else None, 0)
        found += [float(last[-1]), float(again[-1])]
    return found


@pytest.mark.parametrize("most", [0, 2, 64])
def test_batches_may_be_kept(most: int) -> None:
    assert run_ranks(retained, 2, most) == [[0.0, 1.0, 2.0, 3.0, 3.0, 4.0]] * 2


def without_files() -> float:
    """The sum of a batch that comes where no more files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected() as groups:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            came = groups.pipeline.broadcast("batch", torch.ones(COUNT), 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return float(came.sum())


def test_no_file_is_needed() -> None:
    assert run_ranks(without_files, 2) == [COUNT, COUNT]


def read_ahead(gone_on: Path) -> tuple[list[float], int]:
    """What comes of batches whose source is further on, and the most that they took of memory."""
    groups, found, most = Groups.connect(2, 1, "gloo", CPU, timedelta(seconds=60)), [], 0
    for i in range(3):
        batch = torch.full((COUNT,), float(i))
        if groups.stage:
            if not i:
                give_up = time.monotonic() + 30
                while not gone_on.exists() and time.monotonic() < give_up:
                    time.sleep(0.01)
                found.append(float(gone_on.exists()))
            batch = groups.pipeline.broadcast("batch", None, 0)
        else:
            groups.pipeline.broadcast("batch", batch, 0, ahead=True)
            batch.zero_()
            if not i:
                gone_on.touch()
        found.append(float(batch[-1]))
        most = max(most, groups.nearby.nbytes)
    groups.close()
    return found, most


def test_a_source_goes_on_until_it_is_one_again(tmp_path: Path) -> None:
    (_, most), (found, _) = run_ranks(read_ahead, 2, tmp_path / "gone on")
    assert found == [1.0, 0.0, 1.0, 2.0]  # it had gone on before the first one was taken
    assert 4 * COUNT <= most < 2 * 4 * COUNT


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("checkpoint", ["never", 0, "always", "except_last"])
def test_batches_lie_there_twice_only_where_activations_are_kept(
    step: Any, checkpoint: Any
) -> None:
    settings = GPipeStrategy(4, checkpoint=checkpoint, step=step)._settings
    assert settings.reads_ahead == (step == "micro-batch" and checkpoint in ("never", 0))


class Changes(L.LightningModule):
    """Changes its batch and its output in place, and keeps batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.kept: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.kept.append(batch)
        z = self.net(batch.mul_(2.0).clone())
        batch[0] = 5.0
        if batch_idx == 3:
            old = torch.stack([kept.sum() for kept in self.kept])
            self.log("kept", old.sum())
        loss: Tensor = (z.square() + batch.square()).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(limit: int | None, devices: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(3)
    samples: Any = torch.randn(64, 8, dtype=torch.float64)
    data = DataLoader(samples, batch_size=16)
    module, strategy = Changes().double(), GPipeStrategy(4) if limit is not None else "auto"
    with mock.patch.object(messages, "_SHARED", limit or messages._SHARED):
        state = train(module, data, strategy=strategy, devices=devices, max_epochs=2)
    return {**state, "kept": module.trainer.callback_metrics["kept"]}


def test_batches_may_be_changed() -> None:
    expected = trained(None, 1)
    first, second = run_ranks(trained, 2, 1)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
