"""What code of the user's catches of refusals is told of."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pytest
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Norm(models.Around):
    """Logs the norm of its weights, if it can be had."""

    where = "step"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "step":
            self.log_norm()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.where == "hook":
            self.log_norm()

    def log_norm(self) -> None:
        try:
            norm = sum(float(p.detach().norm()) for p in self.backbone.parameters())
        except Exception:
            norm = 0.0
        self.log("norm", norm)


class NormInHook(Norm):
    where = "hook"


class Error(models.Around):
    """Logs a number, if it can be read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with suppress(RuntimeError):
            self.log("error", loss.item())
        return loss


class Fallback(models.Around):
    """Another error follows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            float(self.backbone[0].weight[0, 0] + self.backbone[4].weight[0, 0])
        except RuntimeError:
            raise KeyError("number") from None
        return super().training_step(batch, batch_idx)


def told(kind: Any, step: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(2, step=step)
        trainer(devices=2, max_steps=2, strategy=strategy).fit(kind("sgd"))
    return [str(each.message) for each in found if "has caught" in str(each.message)]


@pytest.mark.parametrize(
    ("kind", "step", "text"),
    [
        (Norm, "mini-batch", "'norm' reads 'backbone."),
        (NormInHook, "mini-batch", "'norm' reads 'backbone."),
        (Error, "micro-batch", "'item' reads a value of the step that stage 1 has"),
        (models.Around, "micro-batch", ""),
    ],
)
def test_a_refusal_that_is_caught_is_told_of(kind: Any, step: str, text: str) -> None:
    found = [each for texts in run_ranks(told, 2, kind, step) for each in texts]
    assert bool(found) == bool(text)
    assert all(text in each for each in found)


def test_an_error_that_follows_names_it() -> None:
    with pytest.raises(RankError, match=r"(?s)KeyError.*has caught this error.*reads 'backbone\."):
        run_ranks(told, 2, Fallback, "mini-batch")


class Reads(models.Around):
    """Doesn't catch it."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.detach().cpu().numpy()


def told_of_an_error() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match="reads 'backbone"):
            trainer(devices=2, max_steps=2, strategy=GPipeStrategy(2)).fit(Reads("sgd"))
    return [str(each.message) for each in found if "has caught" in str(each.message)]


def test_what_nobody_catches_is_told_of_once() -> None:
    assert run_ranks(told_of_an_error, 2) == [[], []]
