"""Logged and returned values for which a step per micro-batch compares samples are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import trainer

F = nn.functional
WIDTH, SAMPLES = 6, 16


class Logs(L.LightningModule):
    """Logs a value in validation, and returns it."""

    value: Callable[[Any, Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.classes = nn.Parameter(torch.randn(4, WIDTH))  # as many as samples

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        value = self.value(self.backbone(x), y)
        self.log("value", value)
        return value


def texts_of(what: str, stages: int, chunks: int = 4, kind: type[Logs] = Logs) -> list[str]:
    """What a run warns of."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * SAMPLES, WIDTH, generator=generator)
    y = torch.randint(0, 4, (2 * SAMPLES,), generator=generator)
    kind = type("Kind", (kind,), {"value": (COMPARING | OTHERS)[what]})
    strategy = GPipeStrategy(chunks, step="micro-batch")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loader = DataLoader(TensorDataset(x, y), SAMPLES)
        trainer(strategy=strategy, devices=stages).validate(kind(), loader)
    texts = [str(each.message) for each in found]
    return [text for text in texts if "of several samples together" in text]


def contrastive(module: Any, z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z)
    scores = z @ z.T / 0.1 - 1e9 * torch.eye(len(z))
    return F.cross_entropy(scores, torch.arange(len(z)).roll(1, 0))


def neighbours(module: Any, z: Tensor, y: Tensor) -> Tensor:
    nearest = torch.cdist(z, z).topk(2, largest=False).indices[:, 1]
    return (nearest == y).float().mean()


def broadcast(module: Any, z: Tensor, y: Tensor) -> Tensor:
    alike = F.cosine_similarity(z[:, None], z[None], dim=-1)
    return (alike * (y[:, None] == y[None])).mean()


def one_by_one(module: Any, z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([row[:4].softmax(0)[0] for row in z]).mean()


COMPARING: dict[str, Any] = {
    "matmul": contrastive,
    "cdist": neighbours,
    "cosine_similarity": broadcast,
    "einsum": lambda _, z, y: torch.einsum("if, jf -> ij", z, z).exp().mean(),
    "eq": lambda _, z, y: (y == y[:, None]).float().mean(),
    "linear": lambda _, z, y: F.linear(z, z).logsumexp(1).mean(),
    "softmax": lambda _, z, y: z.softmax(0).amax(1).mean(),
    "argsort": lambda _, z, y: (z[:, 0].argsort() * y).float().mean(),
}
OTHERS: dict[str, Any] = {
    "a loss": lambda _, z, y: F.cross_entropy(z, y),
    "weights of as many classes": lambda m, z, y: F.cross_entropy(z @ F.normalize(m.classes).T, y),
    "their bias": lambda m, z, y: (z[:, :4] + m.classes[:, 0]).softmax(1).amax(1).mean(),
    "along features": lambda _, z, y: (
        z.sort(1).values - z.topk(2, 1).values.sum(1)[:, None]
    ).mean(),
    "turned features": lambda _, z, y: (z.roll(1, dims=1) * z.flip(dims=(1,)) * z).mean(),
    "sums of products": lambda _, z, y: (F.one_hot(y, 4).float().T @ z[:, :4]).mean(),
    "one by one": one_by_one,
    "places": lambda _, z, y: (z[:, None, :4] * torch.eye(4)[None]).mean(),
}


class Weighs(Logs):
    """Returns weights of its samples, by the name that training steps have for theirs."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"value": super().validation_step(batch, batch_idx), "weight": batch[0][:, 0]}


def test_weights_of_samples_are_no_weight() -> None:
    assert texts_of("a loss", 1, kind=Weighs) == []


@pytest.mark.parametrize("what", COMPARING)
def test_compared_samples_are_told_of(what: str) -> None:
    logged, returned = texts_of(what, 1)
    told = f"isn't a mean over samples: '{what}' computes it of several samples together"
    assert logged.startswith(f"What self.log('value', ...) logs {told}")
    assert returned.startswith(f"What the step returned {told}")


def test_they_are_told_of_by_one_rank() -> None:
    assert [*map(len, run_ranks(texts_of, 2, "matmul", 2))] == [0, 2]
    assert texts_of("matmul", 1, chunks=1) == []


@pytest.mark.parametrize("what", OTHERS)
def test_nothing_is_told_of_other_values(what: str) -> None:
    assert texts_of(what, 1) == []
