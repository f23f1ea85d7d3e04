"""Metrics whose calls look at all samples: whether any score is out of 0 to 1 makes all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryCalibrationError,
    BinaryF1Score,
    MulticlassAveragePrecision,
    MultilabelF1Score,
)

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.at_once import looks_at_all
from tests.ranks import run_ranks
from tests.training import trainer

SAMPLES, FEATURES, CLASSES = 24, 6, 3


class Judged(L.LightningModule):
    """Gives metrics logits, of which most lie in 0 to 1."""

    is_sure = False  # whether they are probabilities

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        layers = (nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
        self.backbone = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
        self.double()
        self.accuracy, self.f1 = BinaryAccuracy(), BinaryF1Score()
        self.curves = MetricCollection([BinaryAUROC(), BinaryCalibrationError(n_bins=4)])
        self.labels, self.precisions = (
            MultilabelF1Score(CLASSES),
            MulticlassAveragePrecision(CLASSES),
        )
        self.seen: list[Tensor] = []

    def scores(self, x: Tensor) -> Tensor:
        scores: Tensor = 0.7 * self.backbone(x) + 0.4
        return scores.sigmoid() if self.is_sure else scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.scores(x)
        self.log("first", self.accuracy(scores[:, 0], y[:, 0]), on_step=True, on_epoch=True)
        self.log_dict(self.curves(scores[:, 1], y[:, 1]), on_step=True)
        self.f1(scores[:, 0], y[:, 0])
        self.f1.update(scores[:, 1], y[:, 1])
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        return F.mse_loss(scores, y.double())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.trainer.callback_metrics["first"].clone())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.scores(x)
        self.labels.update(scores, y)
        self.precisions(scores.clone(), y.argmax(1))  # it may keep them as they are
        scores.zero_()
        self.log_dict({"labels": self.labels, "precisions": self.precisions})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2 * SAMPLES - 5, FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 2, (len(x), CLASSES), generator=generator)
        return DataLoader(TensorDataset(x, y), SAMPLES)

    val_dataloader = train_dataloader


class Sure(Judged):
    is_sure = True


KINDS: Sequence[type[Judged]] = Judged, Sure


def figures(stages: int | None, step: Any = "micro-batch") -> list[Any]:
    found = []
    for kind in KINDS:
        module = kind()
        strategy = {} if stages is None else {"strategy": GPipeStrategy(8, step=step)}
        run = trainer(max_epochs=2, devices=stages or 1, **strategy)
        run.fit(module)
        found.append(({k: v.double() for k, v in run.callback_metrics.items()}, module.seen))
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_a_mini_batchs_scores_are_judged_together(stages: int) -> None:
    expected = figures(None)
    assert len(expected[0][0]) == 10
    for found in run_ranks(figures, stages, stages):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Weighted(Judged):
    """A parameter meets a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(1.0, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.scores(batch[0]), batch[1].double())
        loss = loss * (-self.weight).exp() + self.weight + self.offset * self.weight
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def weights(stages: int | None) -> dict[str, Tensor]:
    strategy = {} if stages is None else {"strategy": GPipeStrategy(8, step="micro-batch")}
    module = Weighted()
    trainer(max_epochs=2, devices=stages or 1, **strategy).fit(module)
    return module.state_dict()


def test_a_mean_may_meet_a_parameter() -> None:
    expected = weights(None)
    torch.testing.assert_close(run_ranks(weights, 2, 2)[0], expected, rtol=0, atol=1e-10)


class Asks(Judged):
    """Computes metrics in the step, of what they have been given so far."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.scores(x)
        self.accuracy.update(scores[:, 0], y[:, 0])
        self.curves.update(scores[:, 1], y[:, 1])
        self.log("first", self.accuracy.compute())
        self.log("curve", self.curves["BinaryAUROC"].compute())
        return F.mse_loss(scores, y.double())

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def asked(stages: int) -> dict[str, Tensor]:
    module = Asks()
    run = trainer(max_epochs=1, devices=stages, strategy=GPipeStrategy(2, step="micro-batch"))
    run.fit(module)
    return {name: value.double() for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_metric_that_a_step_computes_has_been_updated(stages: int) -> None:
    for found in run_ranks(asked, stages, stages):
        assert found["first"] > 0
        assert found["curve"] > 0


def test_what_is_large_or_no_score_does_not_wait() -> None:
    metric, labels = BinaryAccuracy(), torch.ones(8, dtype=torch.int64)
    assert looks_at_all(metric, (torch.rand(8), labels))
    assert not looks_at_all(metric, (torch.rand(8, 3, 32, 32), labels))
    assert not looks_at_all(metric, (labels, labels))
    assert not looks_at_all(MeanSquaredError(), (torch.rand(8), torch.rand(8)))
