"""What models of Hugging Face record of their blocks, by hooks, while a variable says so."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.training import train

RECORDED: ContextVar[dict[str, list[Any]] | None] = ContextVar("recorded", default=None)


@pytest.fixture(autouse=True)
def _transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = ModuleType("transformers.utils.output_capturing")
    monkeypatch.setattr(capturing, "_active_collector", RECORDED, raising=False)
    monkeypatch.setitem(sys.modules, capturing.__name__, capturing)


def output_capturing_hook(module: nn.Module, args: Any, output: Any) -> None:
    if (recorded := RECORDED.get()) is not None:
        recorded["hidden_states"].append(output[0])


class Block(nn.Linear):
    """Returns what only a run of it tells: two tensors."""

    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return made, made.tanh()


class Records(models.Module):
    """Records the hidden states of its blocks, and doesn't use them."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(3))
        for block in self.blocks:
            block.register_forward_hook(output_capturing_hook)

    def forward(self, x: Tensor) -> Tensor:
        found: dict[str, list[Any]] = {"hidden_states": []}
        token = RECORDED.set(found)
        for block in self.blocks:
            x, part = block(x)
            x = x + part
        RECORDED.reset(token)
        return self.head(x, found["hidden_states"])

    def head(self, x: Tensor, states: list[Any]) -> Tensor:
        return x


class Logs(Records):
    def head(self, x: Tensor, states: list[Any]) -> Tensor:
        self.log("norm", states[1].detach().norm())
        return x


class Adds(Records):
    def head(self, x: Tensor, states: list[Any]) -> Tensor:
        return torch.add(x, states[1])


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", [Logs, Adds])
def test_hidden_states_that_are_recorded_and_used_are_refused(kind: Any, step: Any) -> None:
    with pytest.raises(RuntimeError, match="records hidden_states of its blocks"):
        train(kind("sgd"), max_steps=1, strategy=GPipeStrategy(2, step=step))


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_those_that_are_dropped_do_not_matter(step: Any) -> None:
    found = []
    for options in ({}, {"strategy": GPipeStrategy(2, step=step)}):
        torch.manual_seed(4)
        found.append(train(Records("sgd"), max_steps=2, **options))
    torch.testing.assert_close(found[1], found[0])
