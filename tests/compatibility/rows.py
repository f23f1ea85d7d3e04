"""Rows of docs/compatibility.md, and what backs them: a run with two stages beside a plain one.

With STEP=micro-batch in the environment, rows that work are run with a step per micro-batch, two
stages beside one.
"""

from __future__ import annotations

import csv
import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import trainer

STAGES = 2
PER_MICRO_BATCH = os.environ.get("STEP") == "micro-batch"


class Module(models.Around):
    """Trains, validates, tests and predicts; counts the batches of each."""

    samples = 6

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.count(f"val{dataloader_idx}")
        self.log("val_loss", self.loss(*batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.count("test")
        self.log("test_loss", self.loss(*batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count("predict")
        return self(batch[0])

    def train_dataloader(self) -> Any:
        self.count("train_dataloader")
        return self.loader(1)

    def val_dataloader(self) -> Any:
        self.count("val_dataloader")
        return self.loader(2)

    def test_dataloader(self) -> Any:
        return self.loader(3)

    def predict_dataloader(self) -> Any:
        return self.loader(4)

    def loader(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(
            2, 4 * self.samples, models.WIDTH, generator=generator, dtype=torch.float64
        )
        return DataLoader(TensorDataset(x, y), batch_size=self.samples)


@dataclass(frozen=True)
class Row:
    """A row that works: whatever is compared is the same as with a plain Trainer.

    Args:
        options: The Trainer's, or a function of a folder that returns them. ``max_epochs`` is 2,
            unless given.
        module: The module to train.
        also: Called with the Trainer, the module and the folder when it is fitted; its result is
            compared, too.
        strategy: The strategy's options.
        atol: How far numbers may be off.
        per_micro_batch: A part of the error, where a step per micro-batch is refused.
    """

    options: Any = field(default_factory=dict)
    module: Callable[[], L.LightningModule] = Module
    also: Callable[[L.Trainer, Any, Path], Any] | None = None
    strategy: dict[str, Any] = field(default_factory=dict)
    atol: float = 1e-10
    per_micro_batch: str = ""


@dataclass(frozen=True)
class Refused:
    """A row that is refused before training starts.

    Args:
        message: A part of the error.
        options: As for :class:`Row`.
        module: The same.
        strategy: The same.
    """

    message: str
    options: Any = field(default_factory=dict)
    module: Callable[[], L.LightningModule] = Module
    strategy: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """A row that differs from a plain Trainer, or that other processes are needed for.

    Args:
        test: Called with a folder; shows how.
    """

    test: Callable[[Path], object]


Rows = dict[str, Row | Refused | Shown]


def check(file: str, rows: Rows, name: str, folder: Path) -> None:
    """Run the test of a row.

    Args:
        file: The module with its section's ``ROWS``.
        rows: Those.
        name: The row.
        folder: An empty folder.
    """
    row = rows[name]
    if PER_MICRO_BATCH:
        _check_per_micro_batch(row, file, name, folder)
    elif isinstance(row, Shown):
        row.test(folder)
    elif isinstance(row, Refused):
        with pytest.raises(RankError) as caught:
            run_ranks(_run, STAGES, file, name, str(folder), STAGES)
        assert row.message in str(caught.value), caught.value
    else:
        plain = _run(file, name, str(folder / "plain"), 0)
        place = str(folder / "pipeline")
        for found in run_ranks(_run, STAGES, file, name, place, STAGES):
            assert_same(found, plain, row.atol)


def _check_per_micro_batch(row: Row | Refused | Shown, file: str, name: str, folder: Path) -> None:
    if not isinstance(row, Row):
        pytest.skip("no row that works")
    if row.per_micro_batch:
        with pytest.raises(RankError) as caught:
            run_ranks(_run, STAGES, file, name, str(folder), STAGES)
        assert row.per_micro_batch in str(caught.value), caught.value
        return
    (one,) = run_ranks(_run, 1, file, name, str(folder / "one"), 1)
    for found in run_ranks(_run, STAGES, file, name, str(folder / "two"), STAGES):
        assert_same({**found, "counts": None}, {**one, "counts": None}, row.atol)


def assert_same(found: Any, expected: Any, atol: float) -> None:
    """Check that trees are equal, numbers nearly so."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    assert spec == other_spec
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, Tensor | float):
            torch.testing.assert_close(leaf, other, atol=atol, rtol=0)
        else:
            assert leaf == other


def logged(run: L.Trainer, module: Any, folder: Path) -> list[dict[str, float]]:
    """The rows that a CSVLogger has written."""
    with open(folder / "logs" / "version_0" / "metrics.csv") as lines:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]


def _run(file: str, name: str, folder: str, stages: int) -> dict[str, Any]:
    row = importlib.import_module(file).ROWS[name]
    place = Path(folder)
    place.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _train(row, place, stages)
    finally:
        os.chdir(before)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


def _train(row: Row, folder: Path, stages: int) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = row.module()
    options = row.options(folder) if callable(row.options) else row.options
    step = "micro-batch" if PER_MICRO_BATCH else "mini-batch"
    given = {"chunks": 3, "step": step, **row.strategy}
    pipeline = {"strategy": GPipeStrategy(**given), "devices": stages} if stages else {}
    run = trainer(**{"max_epochs": 2, "devices": 1, **pipeline, **options})
    run.fit(module)
    run.strategy.barrier()  # files are written
    return {
        "weights": module.state_dict(),
        "steps": (run.global_step, run.current_epoch),
        "metrics": {key: value.item() for key, value in sorted(run.callback_metrics.items())},
        "counts": getattr(module, "counts", None),
        "also": None if row.also is None else row.also(run, module, folder),
    }
