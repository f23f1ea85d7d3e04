"""A warning where much of a step's memory is outside the backbone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train


class Module(models.Module):
    """Spreads the backbone's output over many columns, without a parameter."""

    columns = 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self(x) - y
        wide = output.unsqueeze(2) * torch.linspace(1, 2, self.columns).to(output)
        return wide.tanh().square().mean()


class Wide(Module):
    columns = 60_000


class WideWithBranch(Wide):
    """Has most of its parameters outside the backbone, too."""

    def build(self) -> None:
        super().build()
        self.branch = nn.Linear(models.WIDTH, 40 * models.WIDTH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.branch(x).square().mean()


def warned(kind: str, options: dict[str, Any]) -> list[str]:
    """What a run warns of on this rank."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(globals()[kind](), max_steps=3, devices=2, strategy=GPipeStrategy(3, **options))
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Module", {}, []),
        ("Wide", {}, ["of the memory that a step takes"]),
        ("Wide", {"checkpoint": "always"}, []),
        ("Wide", {"step": "micro-batch"}, []),
        ("WideWithBranch", {}, ["of the parameters are outside"]),
    ],
)
def test_it_is_told_once(kind: str, options: dict[str, Any], expected: list[str]) -> None:
    first, second = run_ranks(warned, 2, kind, options)
    told = [text for text in first if "outside the backbone" in text]
    assert len(told) == len(expected)
    assert all(part in text for part, text in zip(expected, told, strict=True))
    assert not [text for text in second if "outside the backbone" in text]
