"""States of samples that layers carry from one micro-batch to the next are told of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import train


class Layer(nn.Linear):
    """Keeps something of the samples that it is given."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.kept is not None and len(self.kept) == len(y):
            y = y + self.kept
        self.kept = y.detach()
        return y


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.kept is None or len(self.kept) != len(y):
            self.kept = torch.zeros_like(y)
        y = y + self.kept
        self.kept.copy_(y.detach())
        return y


class InTuple(Layer):
    """Its batch is dimension 1, as that of an LSTM's state."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.kept is not None and self.kept[0].shape[1] == len(y):
            y = torch.stack([y, self.kept[0][0]]).sum(0)
        self.kept = y.detach()[None], 0
        return y


class Shows(Layer):
    """Nobody computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.kept is None or self.kept.shape == y.shape:
            self.kept = y.detach()
        return y


class Caches(Layer):
    """It is made once, and as long as the samples are many by chance."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) != len(x):
            self.kept = torch.ones(len(x), 1, dtype=x.dtype)
        return nn.Linear.forward(self, x) * self.kept


class Counts(Layer):
    """It has no row for a sample."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.ones(1) if self.kept is None else self.kept + 1
        return nn.Linear.forward(self, x) * self.kept.item()


class Net(models.Module):
    kind: type[Layer] = Layer

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.kind() for _ in range(4)))


def told(kind: type[Layer], stages: int, step: Any = "mini-batch", chunks: int = 2) -> list[str]:
    module = type(kind.__name__, (Net,), {"kind": kind})("sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(chunks, step=step, balance="params")
        train(module, max_steps=3, devices=stages, strategy=strategy)
    return [text for w in caught if "whose samples are others" in (text := str(w.message))]


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", [Layer, InPlace, InTuple])
def test_a_state_of_samples_is_told_of_once(kind: type[Layer], step: str) -> None:
    (text,) = told(kind, 1, step)
    assert f"Layer 0 ({kind.__name__}) of the backbone keeps 'kept', with a row for each" in text


def test_every_stage_looks() -> None:
    found = run_ranks(told, 2, Layer, 2)
    assert [[text[:9] for text in texts] for texts in found] == [["Layer 0 ("], ["Layer 2 ("]]


@pytest.mark.parametrize("kind", [Shows, Caches, Counts])
def test_others_are_not_told_of(kind: type[Layer]) -> None:
    assert told(kind, 1) == []


def test_one_micro_batch_is_not_looked_at() -> None:
    assert told(Layer, 1, chunks=1) == []


@pytest.mark.filterwarnings("ignore:Layer 0 .Layer. of the backbone keeps")
def test_a_look_leaves_no_trace() -> None:
    module = type("Kept", (Net,), {"kind": Layer})("sgd")
    train(module, max_steps=3, strategy=GPipeStrategy(2, balance="params"))
    assert all(type(layer.kept) is Tensor for layer in module.backbone)
    assert not any("_is_read" in vars(layer.kept) for layer in module.backbone)
