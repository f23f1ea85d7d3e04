"""What stages log with different values, by hooks that run on one of them."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.models import Around
from tests.ranks import run_ranks
from tests.training import trainer


class Logs(Around):
    """Logs what is the same everywhere, and times."""

    def build(self) -> None:
        super().build()
        self.kept = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.backbone(self.before(x))
        self.hook(hidden)
        loss = nn.functional.mse_loss(self.after(hidden), y)
        self.log("loss", loss)
        self.log("nothing", loss * torch.nan)
        self.log("seconds", time.perf_counter())
        return loss

    def hook(self, hidden: Tensor) -> None:
        pass

    def on_after_backward(self) -> None:
        self.log("kept", self.kept)


class Kept(Logs):
    """Keeps the norm of a gradient."""

    def hook(self, hidden: Tensor) -> None:
        hidden.register_hook(self.keep)

    def keep(self, gradient: Tensor) -> None:
        self.kept = gradient.norm()


class KeptByHead(Kept):
    """The same, by a module's hook."""

    def build(self) -> None:
        super().build()
        self.after.register_full_backward_hook(lambda _, __, given: self.keep(given[0]))

    def hook(self, hidden: Tensor) -> None:
        pass


def told(kind: type[Logs], step: Any, stages: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=1, devices=stages, strategy=GPipeStrategy(3, step=step)).fit(kind())
    return [str(w.message) for w in caught if "log different values" in str(w.message)]


@pytest.mark.parametrize("kind", [Kept, KeptByHead])
def test_values_of_one_stage_are_told_of_once(kind: type[Logs]) -> None:
    texts, *others = run_ranks(told, 2, kind, "mini-batch", 2)
    assert len(texts) == 1
    assert "different values of 'kept': stage 0" in texts[0]
    assert others == [[]]


@pytest.mark.parametrize(
    ("kind", "step", "stages"),
    [(Logs, "mini-batch", 2), (Kept, "mini-batch", 1), (Logs, "micro-batch", 2)],
)
def test_nothing_is_told_of_others(kind: type[Logs], step: str, stages: int) -> None:
    assert run_ranks(told, stages, kind, step, stages) == [[]] * stages
