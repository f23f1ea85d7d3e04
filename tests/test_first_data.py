"""Layers that set themselves up by the first data that they see."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.training import train


class ActNorm(nn.Module):
    """Of a normalizing flow: its first data come out with mean 0 and variance 1."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.is_set_up = True
            self.shift.data.copy_(-x.mean(0))
            self.scale.data.copy_(1 / x.std(0))
        return (x + self.shift) * self.scale


class Codebook(nn.Module):
    """Begins with samples, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(2, WIDTH))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            self.codes.copy_(x[:2].detach())
            self.initialized = torch.tensor(True)
        nearest = torch.cdist(x, self.codes).argmin(1)
        return x + (self.codes[nearest] - x).detach()


class Counts(nn.Module):
    """Counts, keeps a table, and clamps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", None)
        self.norm, self.words = nn.BatchNorm1d(WIDTH), nn.Embedding(3, WIDTH, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype, device=x.device)
        return self.norm(x) + self.table + self.words((x[:, 0] > 0).long())


class Around(models.Module):
    kind: Any = ActNorm

    def build(self) -> None:
        layers = nn.Linear(WIDTH, WIDTH), self.kind(), nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*layers)


def texts_of(kind: Any, **options: Any) -> list[str]:
    torch.manual_seed(2)
    module = type("Module", (Around,), {"kind": kind})()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(module, max_steps=3, strategy=GPipeStrategy(**options))
    return [str(each.message) for each in found if "first micro-batch" in str(each.message)]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ActNorm, "changes its parameter 'shift'"),
        (Codebook, "changes its buffer 'initialized', which seems to tell whether it is set up"),
    ],
)
def test_layers_that_the_first_data_set_up_are_told_of(
    kind: Any, what: str, checkpoint: Any
) -> None:
    (text,) = texts_of(kind, chunks=2, checkpoint=checkpoint)
    assert text.startswith(f"Layer 1 ({kind.__name__}) of the backbone {what}")
    (text,) = texts_of(kind, chunks=2, checkpoint=checkpoint, step="micro-batch")
    assert text.startswith(f"Layer 1 ({kind.__name__}) of the backbone {what}")
    assert texts_of(kind, chunks=1, checkpoint=checkpoint) == []


def test_what_layers_may_change_is_not_told_of() -> None:
    assert texts_of(Counts, chunks=2, checkpoint="never") == []


def test_a_call_before_the_run_sets_them_up() -> None:
    x = torch.randn(8, WIDTH, dtype=torch.double)
    found = []
    for strategy in ("auto", GPipeStrategy(2)):
        torch.manual_seed(2)
        module = Around()
        module(x)
        found.append(train(module, max_steps=3, strategy=strategy))
    torch.testing.assert_close(*found, atol=1e-10, rtol=0)
