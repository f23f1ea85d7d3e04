"""Layers whose forwards change parameters, where forwards run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.test_whole_model import expected
from tests.training import train


class Follows(nn.Module):
    """Moves a frozen parameter towards the mean of what it sees, as codebooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.seen.clone()
        if self.training:
            self.seen.copy_(0.9 * self.seen + 0.1 * x.detach().mean(0))
        return y


class Following(models.Module):
    """Such a layer between others."""

    def build(self) -> None:
        self.backbone = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Follows(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )


class Bounds(nn.Linear):
    """Bounds its weights, which does nothing the second time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Bounded(models.Module):
    """Such layers."""

    def build(self) -> None:
        self.backbone = nn.Sequential(*(Bounds(WIDTH, WIDTH) for _ in range(4)))


def weights(kind: type[models.Module], state: Any, chunks: int, checkpoint: Any, step: Any) -> Any:
    module = kind("sgd")
    module.load_state_dict(state)
    devices = torch.distributed.get_world_size()
    strategy = GPipeStrategy(chunks, checkpoint=checkpoint, step=step)
    return train(module, max_steps=3, devices=devices, strategy=strategy)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize(("chunks", "checkpoint"), [(1, "always"), (4, "always"), (4, 2)])
def test_a_change_that_would_be_made_again_is_refused(
    chunks: int, checkpoint: Any, step: str
) -> None:
    state = Following("sgd").state_dict()
    with pytest.raises(RankError, match=r"changes its parameter of shape \(6,\) in its forward"):
        run_ranks(weights, 2, Following, state, chunks, checkpoint, step)


@pytest.mark.parametrize(
    ("kind", "chunks", "checkpoint", "step"),
    [
        (Following, 1, "never", "mini-batch"),
        (Following, 1, "never", "micro-batch"),
        (Bounded, 1, "always", "mini-batch"),
        (Bounded, 1, "always", "micro-batch"),
        (Bounded, 4, "always", "mini-batch"),  # else autograd refuses what others' forwards change
    ],
)
def test_others_are_as_in_a_plain_trainer(
    kind: type[models.Module], chunks: int, checkpoint: str, step: str
) -> None:
    state, plain = expected(kind, {"max_steps": 3})
    found = run_ranks(weights, 2, kind, state, chunks, checkpoint, step)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)
