"""Rows that a step per micro-batch returns, and computes of several samples, are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.models import WIDTH, Around
from tests.ranks import run_ranks
from tests.training import trainer

MIXED: dict[str, Callable[[Tensor], Any]] = {
    "'softmax' computes them": lambda rows: rows.softmax(0),
    "'sub' computes them": lambda rows: {"centred": rows - rows.mean(0)},
    "'cumsum' computes them": lambda rows: [rows, rows.cumsum(0)],
    "'argsort' computes them": lambda rows: rows[:, 0].argsort(),
}
APART: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda rows: rows,
    "features": lambda rows: {"normed": rows / rows.norm(dim=1, keepdim=True), "zero": 0 * rows},
    "classes": lambda rows: (rows.argmax(1), rows.softmax(1), rows > 0),
    "numbers": lambda rows: (rows.detach(), 3, "text", None),
}


class Predicts(Around):
    gives: Callable[[Any, Tensor], Any]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.gives(self(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.gives(self(batch[0]))


def told(name: str, stages: int, loop: str) -> list[str]:
    gives = (MIXED | APART)[name]
    module = type("Given", (Predicts,), {"gives": lambda self, rows: gives(rows)})("sgd")
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    loader = DataLoader(TensorDataset(rows), 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(devices=stages, strategy=GPipeStrategy(2, step="micro-batch"))
        getattr(run, loop)(module, loader)
    return [text for w in caught if "samples together" in (text := str(w.message))]


@pytest.mark.parametrize("name", MIXED)
def test_rows_of_several_samples_are_told_of_once(name: str) -> None:
    (text,) = told(name, 1, "predict")
    assert "has rows of which each isn't of one sample" in text
    assert f"{name} of several samples together" in text


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("loop", ["predict", "validate"])
def test_others_are_not_told_of(name: str, loop: str) -> None:
    assert told(name, 1, loop) == []


def test_the_last_stage_tells() -> None:
    first, last = run_ranks(told, 2, "'softmax' computes them", 2, "predict")
    assert first == []
    assert len(last) == 1


def test_numbers_that_steps_are_given_come_out_as_they_are() -> None:
    """Also that of the batch whose micro-batches have as many samples."""

    class Gives(Around):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            more = {"loader": dataloader_idx, "samples": len(batch[0])}
            return self(batch[0]).mean(), batch_idx, more

    rows = torch.zeros(32, WIDTH, dtype=torch.float64)
    loaders = [DataLoader(TensorDataset(rows), 8), DataLoader(TensorDataset(rows[:8]), 4)]
    run = trainer(strategy=GPipeStrategy(4, step="micro-batch"))
    found = run.predict(Gives(), loaders)
    assert found is not None
    numbers = [[(i, more["loader"], more["samples"]) for _, i, more in loader] for loader in found]
    assert numbers == [[(i, 0, 8) for i in range(4)], [(i, 1, 4) for i in range(2)]]
