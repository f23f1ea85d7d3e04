"""Auxiliary losses whose gradient a layer gives in its backward."""

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


class Adds(torch.autograd.Function):
    """Gives an auxiliary loss a gradient, or none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_tensor(ctx.scale), None


class Routed(nn.Module):
    """Has a gate whose loss is added in the backward."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Adds.apply(self.layer(x), self.gate(x).square().mean(), self.scale)
        return out


class Module(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), nn.Tanh(), Routed())


def gates(**options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = Module("sgd")
    train(module, devices=1, max_steps=1, **options)
    return [module.backbone[i].gate.weight.detach() for i in (1, 3)]


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_an_auxiliary_loss_that_counts_once_per_micro_batch_is_told_of(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = gates(strategy=GPipeStrategy(1, step=step))
    with pytest.warns(UserWarning, match="as Adds may do for an auxiliary loss. With 4 micro-"):
        gates(strategy=GPipeStrategy(4, step=step))
    monkeypatch.setattr(Routed, "scale", 0.25)  # what the warning says
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Layers give gradients")
        torch.testing.assert_close(gates(strategy=GPipeStrategy(4, step=step)), once)
    monkeypatch.setattr(Routed, "scale", 0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Layers give gradients")
        gates(strategy=GPipeStrategy(4, step=step))
