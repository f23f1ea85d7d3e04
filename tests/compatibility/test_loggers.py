"""Every built-in logger."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
)
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gpipe import GPipeStrategy
from tests import scripts, wandb_file
from tests.compatibility.rows import STAGES, Module, Refused, Row, Rows, Shown, check, logged
from tests.ranks import run_ranks
from tests.training import trainer

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "chunks": 3,
    "stages": STAGES,
    "replicas": 1,
    "partition": [3, 3],
    "backbone": "backbone",
    "balance": "flops",
    "checkpoint": "except_last",
    "deferred_batch_norm": True,
    "virtual_stages": 1,
    "step": "mini-batch",
    "schedule": "auto",
    "shard_optimizer_state": False,
    "memory_limit": None,
}


class Hyper(Module):
    """Has hyperparameters, which loggers get, too."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()


class Graph(Module):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6, dtype=torch.float64)


class Own(Logger):
    """A user's logger."""

    name, version = "own", 0

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.hyperparameters: dict[str, Any] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyperparameters.update(params)


def beside(make: Any) -> Any:
    return lambda folder: {"logger": make(folder), "log_every_n_steps": 1}


def scalars(run: L.Trainer, module: Any, folder: Path) -> dict[str, Any]:
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    names = set(events.Tags()["scalars"]) - {"hp_metric"}
    return {name: [(s.step, s.value) for s in events.Scalars(name)] for name in sorted(names)}


def own_rows(run: L.Trainer, module: Any, folder: Path) -> Any:
    logger: Any = run.logger
    return logger.rows


def mlflow(folder: Path) -> MLFlowLogger:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # needs no data base
    return MLFlowLogger(save_dir=str(folder))


def mlflow_metrics(run: L.Trainer, module: Any, folder: Path) -> Any:
    client = MlflowClient(f"file:{folder}")
    (experiment,) = client.search_experiments(filter_string="name = 'lightning_logs'")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "val_loss")
    return [(metric.step, metric.value) for metric in history]


def wandb_run(folder: Path) -> None:
    """The example, offline: one run, with the pipeline in its configuration."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py")]
    options = ["--logger", "wandb", "--stages", "2", "--epochs", "1"]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    code, screen = scripts.run([*command, *options], 240, env=environment, cwd=folder)
    assert code == 0, screen
    (run,) = (folder / "logs" / "wandb").glob("*-run-*/*.wandb")
    config, history = wandb_file.read(run)
    settings = config["gpipe"]
    assert (settings["stages"], settings["chunks"], settings["replicas"]) == (2, 8, 1)
    assert settings["balance"] == "flops"
    assert len(settings["partition"]) == 2
    assert sum(settings["partition"]) == 16
    assert config["width"] == 32
    names = {name for row in history for name in row}
    assert {"train_loss", "val_accuracy", "test_accuracy"} <= names


ROWS: Rows = {
    "CSVLogger": Row(
        beside(lambda folder: CSVLogger(folder, "logs")),
        Hyper,
        also=logged,
    ),
    "CometLogger": Row(
        beside(lambda folder: CometLogger(online=False, offline_directory=str(folder))), Hyper
    ),
    "Logger": Row(beside(lambda folder: Own()), also=own_rows),
    "MLFlowLogger": Row(
        beside(mlflow),
        Hyper,
        also=mlflow_metrics,
    ),
    "TensorBoardLogger": Row(beside(TensorBoardLogger), Hyper, also=scalars),
    "TensorBoardLogger(log_graph=True)": Refused(
        "log the graph before the Trainer runs",
        beside(lambda folder: TensorBoardLogger(folder, log_graph=True)),
        Graph,
    ),
    "WandbLogger": Shown(wandb_run),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)


def test_settings(tmp_path: Path) -> None:
    """Loggers get the strategy's settings beside the user's hyperparameters."""
    own, board, written = run_ranks(_settings, STAGES, str(tmp_path))[0]
    assert own == board == {"width": 7, "gpipe": SETTINGS}
    assert yaml.safe_load(written) == own
    plain = run_ranks(_settings, STAGES, str(tmp_path / "without"), False)[0]
    assert plain[0] == plain[1] == {}


def _settings(folder: str, enable: bool = True) -> Any:
    own, board, csv = Own(), TensorBoardLogger(folder), CSVLogger(folder, "csv")
    run = trainer(
        devices=STAGES,
        strategy=GPipeStrategy(3),
        max_epochs=1,
        logger=[own, board, csv],
        enable_autolog_hparams=enable,
    )
    run.fit(Hyper())
    path = Path(folder) / "csv" / "version_0" / "hparams.yaml"
    return own.hyperparameters, dict(board.hparams), path.read_text() if path.exists() else ""


class Fixed(Own):
    """Takes settings once, as MLflow does in a run."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        settings = params.get("gpipe")
        if settings and self.hyperparameters.setdefault("gpipe", settings) != settings:
            raise ValueError("changing settings is not allowed")


def test_a_logger_that_does_not_take_settings() -> None:
    assert run_ranks(_fixed, STAGES)[0] == [3]


def _fixed() -> Any:
    logger, found = Fixed(), []
    for chunks in (3, 2):
        strategy = GPipeStrategy(chunks)
        run = trainer(devices=STAGES, strategy=strategy, max_epochs=1, logger=logger)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(Module())
        found += [chunks] if not any("did not take" in str(w.message) for w in caught) else []
    return found


def _fast_dev_run(folder: str) -> int:
    logger = TensorBoardLogger(folder, log_graph=True)  # a stand-in takes its place
    run = trainer(devices=STAGES, strategy=GPipeStrategy(3), fast_dev_run=True, logger=logger)
    run.fit(Graph())
    return run.global_step


def test_fast_dev_run_logs_no_graph(tmp_path: Path) -> None:
    assert run_ranks(_fast_dev_run, STAGES, str(tmp_path)) == [1, 1]
