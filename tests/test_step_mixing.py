"""A step per micro-batch that mixes the samples it is given, as mixup does, is told of."""

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
from tests.training import train

F = nn.functional
WIDTH, SAMPLES = 6, 12


class Before(L.LightningModule):
    """Does something with its input before the backbone."""

    before: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = self.backbone(self.before(x))
        return F.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def texts_of(what: str, stages: int, chunks: int = 4) -> list[str]:
    """What a run warns of."""
    x, y = torch.randn(2, 2 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, y), SAMPLES)
    kind = type("Kind", (Before,), {"before": (MIXING | OTHERS)[what]})
    strategy = GPipeStrategy(chunks, step="micro-batch")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(kind(), loader, strategy=strategy, devices=stages, max_epochs=2)
    texts = [str(each.message) for each in found]
    return [text for text in texts if "computes samples together" in text]


def order(x: Tensor) -> Tensor:
    return torch.arange(len(x) - 1, -1, -1)


def cut_and_pasted(module: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2:4] = x[order(x), 2:4]
    return x


def masked(module: Any, x: Tensor) -> Tensor:
    lengths = (x > 0).sum(1)
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    beside = torch.arange(lengths.max())[None] < lengths[:, None]
    return x * (mask.sum(1) + beside.sum(1))[:, None]


MIXING: dict[str, Any] = {
    "add": lambda _, x: 0.3 * x + 0.7 * x.flip(0),
    "lerp": lambda _, x: torch.lerp(x.float(), x.roll(1, 0), 0.3),
    "setitem": cut_and_pasted,
    "add of places": lambda _, x: 0.3 * x + 0.7 * x[order(x)],
    "add of a selection": lambda m, x: m.stem(x + x.index_select(0, order(x))),
    "sub": lambda _, x: x - x.mean(0),
    "std": lambda _, x: x / (x.std() + 1e-6),
    "norm": lambda _, x: x * (1 / x.norm()),
}
OTHERS: dict[str, Any] = {
    "nothing": lambda _, x: x,
    "features": lambda _, x: x - x.mean(1, keepdim=True) + x.flip(1) + x.roll(1, -1),
    "another order": lambda _, x: x[order(x)][order(x)] + x,
    "of each sample": lambda _, x: x + x[torch.arange(len(x)), x.argmax(1)][:, None],
    "a table": lambda _, x: torch.arange(WIDTH * 1.0)[x.argmax(1)][:, None] + x,
    "masks": masked,
    "constants": lambda _, x: (x - torch.ones(WIDTH).mean()) / torch.ones(3, WIDTH).std(0).add(1),
}


@pytest.mark.parametrize("what", MIXING)
def test_mixed_samples_are_told_of_once(what: str) -> None:
    (text,) = texts_of(what, 1)
    assert f"'{what.split()[0]}' makes something of several" in text


def test_they_are_told_of_by_one_rank() -> None:
    assert [*map(len, run_ranks(texts_of, 2, "add", 2))] == [1, 0]
    assert texts_of("add", 1, chunks=1) == []


@pytest.mark.parametrize("what", OTHERS)
def test_nothing_is_told_of_steps_that_do_not_mix(what: str) -> None:
    assert texts_of(what, 1) == []
