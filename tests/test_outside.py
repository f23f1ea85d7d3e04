"""Modules and parameters outside the backbone, with the step once per micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import train


class Before(models.Module):
    """A recurrent layer before the backbone."""

    def build(self) -> None:
        super().build()
        self.recurrent = nn.LSTM(1, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.recurrent(x.unsqueeze(-1))[0][:, -1])


class Behind(models.Module):
    """One behind it."""

    def build(self) -> None:
        super().build()
        self.recurrent = nn.GRU(1, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(self.backbone(x).unsqueeze(-1))[0][:, -1]


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x)) * scale


class Bare(models.Module):
    """A parameter that is given to the blocks as it is."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Scaled(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


CASES = Before, Behind, Bare


def trained(stages: int) -> dict[str, Any]:
    found = {}
    for kind in CASES:
        torch.manual_seed(2)
        strategy = GPipeStrategy(2, step="micro-batch")
        found[kind.__name__] = train(kind(), max_steps=4, devices=stages, strategy=strategy)
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_outside_trains_as_before(stages: int) -> None:
    found = run_ranks(trained, stages, stages)[0]
    for kind in CASES:
        torch.manual_seed(2)
        expected = train(kind(), max_steps=4)
        torch.testing.assert_close(found[kind.__name__], expected, atol=1e-10, rtol=0)
