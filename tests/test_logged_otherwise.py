"""What steps of micro-batches log with other reductions, batch sizes and numbers than means."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics.classification import BinaryAUROC

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import trainer


class Logs(models.Module):
    """Logs sums, greatest values and means with all kinds of options."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        loss = functional.mse_loss(out, y)
        error = functional.l1_loss(out, y)
        tokens = int((batch_idx + 3) * x.abs().sum())
        self.log("loss", loss, batch_size=tokens)
        self.log("total of losses", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("greatest loss", loss.detach(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("total of errors", error, reduce_fx=torch.sum, on_epoch=True)
        self.log("sum", (out - y).square().sum(), reduce_fx="sum", on_epoch=True)
        self.log("bits", (out - y).square().sum() / 8, reduce_fx="sum", on_epoch=True)
        self.log("tenths", (out - y).abs().sum() / 10.0, reduce_fx="sum", on_epoch=True)
        self.log("mean", (out - y).abs().sum() / out.numel(), reduce_fx="sum", on_epoch=True)
        self.log("samples", torch.tensor(float(len(x))), reduce_fx="sum", on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.log("total in validation", loss, reduce_fx="sum")

    val_dataloader = models.Module.train_dataloader


class Numbers(models.Module):
    """Logs what is otherwise, and is told of."""

    what = "batches"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        if self.what == "batches":
            self.log("it", 1.0, reduce_fx="sum", on_epoch=True)
        elif self.what == "samples":
            self.log("it", len(x), reduce_fx="sum", on_epoch=True)
        elif self.what == "made of a number":
            self.log("it", torch.full((), 1.0), reduce_fx="sum")
        elif self.what == "chance":
            self.log("it", (y == y).all().double(), reduce_fx="sum")
        elif self.what == "chance, added up":
            total = torch.zeros((), dtype=torch.float64)
            total += (y == y).all()
            self.log("it", total, reduce_fx="sum")
        elif self.what == "number of samples":
            self.log("it", len(x))
        elif self.what == "constant":
            self.log("it", 7)
        elif self.what == "tokens":
            self.log("it", x.numel(), reduce_fx="sum", on_epoch=True)
        elif self.what == "nothing":
            self.log("it", float("nan"))
        elif self.what == "class":
            labels = x[:, 0] > 1  # of which micro-batches of two may have none
            self.log("it", (out.argmax(1)[labels] == 1).double().mean())
        elif self.what == "class of the data":
            self.log("it", y[x[:, 0] > 1].mean().item())
        return functional.mse_loss(out, y)


def logged(kind: Any, stages: int) -> dict[str, Tensor]:
    torch.manual_seed(4)
    strategy: Any = (
        {"strategy": GPipeStrategy(2, step="micro-batch"), "devices": stages} if stages else {}
    )
    run = trainer(max_epochs=2, limit_train_batches=3, **strategy)
    run.fit(kind("sgd"))
    return dict(run.callback_metrics)


@pytest.mark.parametrize("stages", [1, 2])
def test_means_are_the_mini_batchs_however_they_are_reduced(stages: int) -> None:
    expected = logged(Logs, 0)
    assert len(expected) > 8
    torch.testing.assert_close(run_ranks(logged, stages, Logs, stages)[0], expected)


def told(what: str) -> list[str]:
    module = Numbers("sgd")
    module.what = what
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(strategy=GPipeStrategy(4, step="micro-batch"), devices=2, max_steps=5).fit(module)
    return [text for each in found if "self.log('it'" in (text := str(each.message))]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("batches", "is 1.0 in every micro-batch, and is added up: it counts 4 times"),
        ("made of a number", "is 1.0 in every micro-batch, and is added up: it counts 4 times"),
        ("chance", ""),
        ("chance, added up", ""),
        ("samples", ""),
        ("number of samples", "is as many as each micro-batch has samples, 2 for instance"),
        ("constant", ""),
        ("tokens", ""),
        ("class", ""),
        ("class of the data", "is NaN in some micro-batches and a number in others"),
        ("nothing", ""),
    ],
)
def test_numbers_that_count_otherwise_are_told_of(what: str, text: str) -> None:
    found = run_ranks(told, 2, what)[0]
    assert len(found) == bool(text)
    assert all(text in each for each in found)


class Scores(models.Module):
    """A metric that warns of a class without samples, of which a micro-batch may have none."""

    def build(self) -> None:
        super().build()
        self.score = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.score(out[:, 0].detach().sigmoid(), (torch.arange(len(x)) < self.positives).int())
        self.log("score", self.score)
        return functional.mse_loss(out, y)

    positives = 8


def warned_of_classes(positives: int, strategy: Any) -> list[str]:
    module = Scores("sgd")
    module.positives = positives
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(strategy=strategy, max_steps=2, max_epochs=1).fit(module)
    return [text for each in found if "samples in targets" in (text := str(each.message))]


def test_a_metric_warns_of_the_mini_batch_alone() -> None:
    for positives in (2, 8):
        plain = warned_of_classes(positives, "auto")
        assert bool(plain) == (positives == 8)
        assert warned_of_classes(positives, GPipeStrategy(2, step="micro-batch")) == plain
