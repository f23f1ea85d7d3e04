"""What a step that runs once per micro-batch changes, skips and compares: as a plain Trainer's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import trainer

SIZE = 6


class Names(models.Module):
    """What all of them share."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[:2]
        return self.judge(self(x), y, batch_idx)

    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return functional.mse_loss(out, y)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        rows = torch.randn(2, 24, models.WIDTH, generator=generator, dtype=torch.float64)
        names = [f"{i % 5}" for i in range(24)]
        return DataLoader(list(zip(*rows, names, strict=True)), batch_size=SIZE)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writes(Names):
    """Writes into a queue, through views and ``.data``, and with ``out``; then uses it."""

    def build(self) -> None:
        super().build()
        for name in ("queue", "viewed", "average", "summed", "accumulated"):
            self.register_buffer(name, torch.zeros(2 * SIZE, models.WIDTH))

    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(out, y) + (out @ self.queue.clone().T).square().mean()
        first, given = SIZE * (batch_idx % 2), out.detach()
        self.queue[first : first + len(y)] = given
        self.viewed[first : first + len(y)].copy_(given)
        self.average.data.add_(given.mean(0))
        torch.add(self.summed, given.mean(0), out=self.summed)
        self.accumulated[:2] += given[:2]
        local = torch.zeros_like(y)
        local[:, :2] = given[:, :2]
        beside = local[:, 1:]
        self.log("local", local.sum())
        self.log("beside", beside.sum())
        return loss


class Centred(Names):
    """Keeps a running mean, and subtracts it."""

    def build(self) -> None:
        super().build()
        self.register_buffer("centre", torch.zeros(models.WIDTH))

    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(out - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


class Follows(Names):
    """Has a teacher that follows what is trained."""

    def build(self) -> None:
        super().build()
        self.student = nn.Linear(models.WIDTH, models.WIDTH)
        self.teacher = nn.Linear(models.WIDTH, models.WIDTH).requires_grad_(False)

    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return functional.mse_loss(self.student(out), y) + self.teacher(out).square().mean()


class Reads(Names):
    """Changes no buffer but those of batch norm, and no frozen parameter."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.norm = nn.BatchNorm1d(models.WIDTH)
        self.register_buffer("centre", torch.ones(models.WIDTH))

    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.norm(out) * self.scale - self.centre, y)


class Compares(Names):
    def judge(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.log("less", (y < out).double().mean())
        self.log("at least", (y >= out).double().mean())
        return functional.mse_loss(out, y)


class Skips(Names):
    """Validates without the backbone, but for the last mini-batches of an epoch."""

    val_dataloader = Names.train_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch[0])), reduce_fx="sum", batch_size=1)
        self.log("mean", batch[0].mean(), batch_size=len(batch[0]))
        if batch_idx >= 2:
            self.log("output", self(batch[0]).mean(), batch_size=len(batch[0]))


class Halves(nn.Linear):
    """Has a hook on what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return hidden.tanh()


class Hooked(Names):
    def build(self) -> None:
        layers = (Halves(models.WIDTH, models.WIDTH) for _ in range(4))
        self.backbone = nn.Sequential(*layers)


class Reentrant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return found.tanh()


class Checkpointed(Names):
    def build(self) -> None:
        layers = (Reentrant(models.WIDTH, models.WIDTH) for _ in range(3))
        self.backbone = nn.Sequential(nn.Linear(models.WIDTH, models.WIDTH), *layers)


class Weighs(Names):
    """Weighs samples by strings, of which ``default_collate`` makes a tuple."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, names = batch
        assert isinstance(names, tuple)
        weights = torch.tensor([float(name) for name in names], dtype=y.dtype)
        return ((self(x) - y).square().mean(1) * weights).mean()


class Beside(Names):
    """Has something beside the samples that is as long as the last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, beside = batch
        assert beside["classes"] == ["a", "b", "c"]
        out = self(x)[:, :3] + beside["prior"]
        return functional.mse_loss(out, y[:, :3])

    def train_dataloader(self) -> Any:
        prior = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)

        def collate(rows: list[Any]) -> Any:
            x, y = (torch.stack([row[i] for row in rows]) for i in (0, 1))
            return x, y, {"prior": prior, "classes": ["a", "b", "c"]}

        return DataLoader(super().train_dataloader().dataset[:15], SIZE, collate_fn=collate)


def trained(kind: type[Names], stages: int, chunks: int) -> dict[str, Any]:
    """Train, on a plain Trainer if there are no stages."""
    options: dict[str, Any] = {"devices": 1}
    if stages:
        strategy = GPipeStrategy(chunks, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    torch.manual_seed(5)
    epochs = 1 if kind is Skips else 2  # once the backbone is known, it must be called
    run, module = trainer(max_epochs=epochs, num_sanity_val_steps=0, **options), kind()
    run.fit(module)
    return {**module.state_dict(), **run.callback_metrics}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        (Writes, 1),
        (Compares, 3),
        (Skips, 3),
        (Skips, 1),
        (Hooked, 3),
        (Checkpointed, 3),
        (Weighs, 3),
        (Beside, 3),
    ],
)
def test_as_a_plain_trainer(kind: type[Names], chunks: int, stages: int) -> None:
    expected = trained(kind, 0, 0)
    found = run_ranks(trained, stages, kind, stages, chunks)[0]
    torch.testing.assert_close(found, expected)


def texts_of(kind: type[Names], stages: int, chunks: int) -> list[str]:
    """What a run warns of buffers and frozen parameters."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained(kind, stages, chunks)
    texts = [str(each.message) for each in found]
    return [text for text in texts if "The step changes the" in text]


KEPT = [
    (Writes, "buffer 'queue'"),
    (Centred, "buffer 'centre'"),
    (Follows, "frozen parameter 'teacher.weight'"),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("kind", "name"), KEPT)
def test_changed_buffers_are_told_of(kind: type[Names], name: str, stages: int) -> None:
    found = run_ranks(texts_of, stages, kind, stages, 3)
    assert all(len(texts) <= 1 for texts in found)
    assert any(f"The step changes the {name}." in text for (text,) in filter(None, found))


@pytest.mark.parametrize("kind", [Reads, Compares])
def test_nothing_is_told_of_other_buffers(kind: type[Names]) -> None:
    assert run_ranks(texts_of, 2, kind, 2, 3) == [[], []]
    assert texts_of(Centred, 1, 1) == []
