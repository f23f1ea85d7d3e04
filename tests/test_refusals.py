"""Optimizers that need the whole model are refused by what they do, not by their name alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.refusals import refuse_optimizers
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train


class Search(torch.optim.LBFGS):
    """LBFGS under another name."""


class Sharp(torch.optim.SGD):
    """SAM under another name."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Needs(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("kind", [Search, Sharp, Needs])
def test_an_optimizer_over_all_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} needs all parameters .* SGD or AdamW"):
        refuse_optimizers([kind(nn.Linear(2, 2).parameters(), lr=0.1)])


@pytest.mark.parametrize(
    "name", ["Adam", "Adafactor", "Muon", "NAdam", "Rprop", "SparseAdam", "ASGD", "RMSprop"]
)
def test_optimizers_by_parameter_are_not_refused(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this version of torch has no {name}")
    refuse_optimizers([kind(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)])


class Twice(torch.optim.SGD):
    """Evaluates again where a step along the whole gradient leads."""

    def step(self, closure: Any = None) -> Any:
        closure()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Module(models.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Twice(self.parameters(), lr=0.1)


def fit(stages: int) -> None:
    train(Module(), max_steps=1, devices=stages, strategy=GPipeStrategy(2))


def test_two_gradients_in_a_step_are_refused_over_stages() -> None:
    with pytest.raises(RankError, match=r"A step of Twice computes gradients twice\. Twice"):
        run_ranks(fit, 2, 2)
    run_ranks(fit, 1, 1)
