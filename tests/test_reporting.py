"""What a user logs is what a plain Trainer logs, on every rank."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train, trainer


class Reporting(L.LightningModule):
    """Logs by step and epoch, with metrics and Python lists, and steers a scheduler by it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh()))
        )
        self.metrics = MetricCollection(
            {"accuracy": MulticlassAccuracy(6), "error": MeanSquaredError(num_outputs=6)}
        )
        self.seen = SumMetric()
        self.outputs: list[Tensor] = []
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        out = self.backbone(x)
        loss = nn.functional.cross_entropy(out, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(
            {"norm": out.norm(), "batch": float(batch_idx)}, on_epoch=True, reduce_fx="max"
        )
        return {"loss": loss, "out": out.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.backbone(x)
        self.outputs.append(out)
        self.metrics["accuracy"](out, y)
        self.metrics["error"](out, nn.functional.one_hot(y, 6).double())
        self.seen(len(x))
        self.log("val_loss", nn.functional.cross_entropy(out, y), sync_dist=True)
        self.log_dict({"accuracy": self.metrics["accuracy"], "seen": self.seen})

    def on_validation_epoch_end(self) -> None:
        self.log("val_outputs", torch.cat(self.outputs).abs().mean())
        self.log("val_error", self.metrics["error"].compute().mean())
        self.metrics["error"].reset()
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.05
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }

    def on_train_epoch_end(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def train_dataloader(self) -> Any:
        return self._loader(1, 46)

    def val_dataloader(self) -> Any:
        return self._loader(2, 21)

    def _loader(self, seed: int, samples: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.sum(1).abs().long().clamp(max=5)), batch_size=8)


def report(module: Reporting, folder: Path, **options: Any) -> dict[str, Any]:
    """Train, and return what this rank saw."""
    stopping = EarlyStopping("val_loss", patience=3, mode="min")
    saving = ModelCheckpoint(
        folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True
    )
    run = trainer(
        max_epochs=6,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[stopping, saving],
        enable_checkpointing=True,
        **options,
    )
    run.fit(module)
    return {
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "epochs": run.current_epoch,
        "best": Path(saving.best_model_path).name,
        "stopped": stopping.stopped_epoch,
        "kept": len(list((folder / "checkpoints").iterdir())),
    }


def report_pipeline(module: Reporting, folder: Path, stages: int) -> dict[str, Any]:
    return report(module, folder, devices=stages, strategy=GPipeStrategy(3))


def read(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_metrics_equal_a_plain_trainers(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Reporting()
    expected = report(copy.deepcopy(module), tmp_path / "plain", devices=1)
    ranks = run_ranks(report_pipeline, stages, module, tmp_path / "pipeline", stages)
    rows, expected_rows = read(tmp_path / "pipeline"), read(tmp_path / "plain")
    assert len(rows) == len(expected_rows) > 20
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6, abs=1e-6)
    assert {name for row in rows for name in row} >= {
        "train_loss_step",
        "train_loss_epoch",
        "val_loss",
        "lr",
        "seen",
    }
    assert len({row["lr"] for row in rows if "lr" in row}) > 1, (
        "the plateau scheduler should have acted"
    )
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"]
        assert {**rank, "metrics": None} == {**expected, "metrics": None}


class Words(models.Module):
    """Has an embedding whose gradient depends on all that it is given."""

    def build(self) -> None:
        words = nn.Embedding(5, models.WIDTH, scale_grad_by_freq=True)
        self.backbone = nn.Sequential(words, nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.backbone((x[:, 0].abs() * 2).long() % 5), y)


def test_an_embedding_that_scales_by_frequency_is_told_of() -> None:
    told = "'0' \\(Embedding\\) has scale_grad_by_freq=True"
    with pytest.warns(UserWarning, match=told):
        train(Words("sgd"), devices=1, max_steps=1, strategy=GPipeStrategy(2))
    train(Words("sgd"), devices=1, max_steps=1, strategy=GPipeStrategy(1))
