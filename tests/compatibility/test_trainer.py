"""Every argument of the Trainer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.compatibility.rows import Module, Refused, Row, Rows, Shown, check, logged
from tests.ranks import run_ranks
from tests.training import train


class Dropout(Module):
    """Draws random numbers outside the backbone; with batch norm in it."""

    def build(self) -> None:
        super().build()
        self.backbone.insert(2, nn.BatchNorm1d(6))

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


def by_name(folder: Path) -> None:
    names = run_ranks(_by_name, 2)
    assert names == ["GPipeStrategy"] * 2


def _by_name() -> str:
    run = L.Trainer(accelerator="cpu", devices=2, strategy="gpipe", logger=False, barebones=True)
    return type(run.strategy).__name__


def two_nodes(folder: Path) -> None:
    """Two nodes of one process each, with a pipeline over both."""
    L.seed_everything(5, verbose=False)
    plain = train(Module(), max_epochs=1)
    torch.testing.assert_close(run_ranks(_two_nodes, 2)[0], plain, atol=1e-10, rtol=0)


def _two_nodes() -> Any:
    os.environ.update(NODE_RANK=os.environ["LOCAL_RANK"], LOCAL_RANK="0")
    L.seed_everything(5, verbose=False)
    return train(
        Module(), max_epochs=1, devices=1, num_nodes=2, strategy=GPipeStrategy(3, stages=2)
    )


def saved(run: L.Trainer, module: Any, folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.ckpt"))


def csv(folder: Path) -> dict[str, Any]:
    return {"logger": CSVLogger(folder, "logs"), "log_every_n_steps": 1}


def counting(folder: Path) -> dict[str, Any]:
    def count(run: L.Trainer, module: Any, *_: Any) -> None:
        module.count("end")

    return {"callbacks": [LambdaCallback(on_train_batch_end=count)]}


ROWS: Rows = {
    "accelerator": Row({"accelerator": "cpu"}),
    "strategy": Shown(by_name),
    "devices": Row(),
    "num_nodes": Shown(two_nodes),
    "precision": Row({"precision": "64-true"}),
    "logger": Row(csv, also=logged),
    "callbacks": Row(counting),
    "fast_dev_run": Row({"fast_dev_run": 2}),
    "max_epochs": Row({"max_epochs": 3}),
    "min_epochs": Row({"min_epochs": 2, "max_epochs": 3}),
    "max_steps": Row({"max_steps": 3}),
    "min_steps": Row({"min_steps": 5, "max_epochs": 2}),
    "max_time": Row({"max_time": timedelta(0)}),
    "limit_train_batches": Row({"limit_train_batches": 0.5}),
    "limit_val_batches": Row({"limit_val_batches": 1}),
    "limit_test_batches": Row(
        {"limit_test_batches": 2}, also=lambda run, module, _: run.test(module, verbose=False)
    ),
    "limit_predict_batches": Row(
        {"limit_predict_batches": 1}, also=lambda run, module, _: run.predict(module)
    ),
    "overfit_batches": Row({"overfit_batches": 2}),
    "val_check_interval": Row({"val_check_interval": 2}),
    "check_val_every_n_epoch": Row({"check_val_every_n_epoch": 2, "max_epochs": 3}),
    "num_sanity_val_steps": Row({"num_sanity_val_steps": 1}),
    "log_every_n_steps": Row(csv, also=logged),
    "enable_checkpointing": Row(
        lambda folder: {"enable_checkpointing": True, "default_root_dir": folder}, also=saved
    ),
    "enable_progress_bar": Row({"enable_progress_bar": True}),
    "enable_model_summary": Row({"enable_model_summary": True}),
    "accumulate_grad_batches": Row({"accumulate_grad_batches": 3}),
    "gradient_clip_val": Row({"gradient_clip_val": 0.01}),
    "gradient_clip_algorithm": Row(
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    ),
    "deterministic": Row(
        {"deterministic": True},
        also=lambda *_: torch.are_deterministic_algorithms_enabled(),
    ),
    "benchmark": Row({"benchmark": True}, also=lambda *_: torch.backends.cudnn.benchmark),
    "inference_mode": Row({"inference_mode": False}),
    "use_distributed_sampler": Row({"use_distributed_sampler": False}),
    "profiler": Row({"profiler": "simple"}),
    "detect_anomaly": Row({"detect_anomaly": True}),
    "barebones": Row(
        {
            "barebones": True,
            "logger": None,
            "enable_checkpointing": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        }
    ),
    "plugins": Row({"plugins": [TorchCheckpointIO()]}),
    "sync_batchnorm": Refused("needs GPUs", {"sync_batchnorm": True}),
    "reload_dataloaders_every_n_epochs": Row({"reload_dataloaders_every_n_epochs": 1}),
    "default_root_dir": Row(
        lambda folder: {"enable_checkpointing": True, "default_root_dir": folder / "root"},
        also=saved,
    ),
    "enable_autolog_hparams": Row(
        lambda folder: {**csv(folder), "enable_autolog_hparams": False},
        also=lambda run, module, folder: (folder / "logs/version_0/hparams.yaml").exists(),
    ),
    "model_registry": Row({"model_registry": None}),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)
