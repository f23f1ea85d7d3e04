"""Runs whose steps run once per micro-batch: averages, checkpoints, evaluation, several fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests import step_models as models
from tests.ranks import run_ranks
from tests.training import trainer


def strategy_of(stages: int, step: Any = "micro-batch", **options: Any) -> dict[str, Any]:
    strategy = GPipeStrategy(4, stages=stages, step=step, **options)
    return {"devices": stages, "strategy": strategy}


def averaged(stages: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = models.Tied()
    average = EMAWeightAveraging(decay=0.8)
    run = trainer(max_epochs=2, callbacks=[average], **strategy_of(stages))
    run.fit(module)
    return module.state_dict(), dict(run.callback_metrics)


@pytest.mark.parametrize("stages", [2, 3])
def test_averages_of_what_stages_hold(stages: int) -> None:
    expected = run_ranks(averaged, 1, 1)[0]
    for found in run_ranks(averaged, stages, stages)[:1]:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def part(stages: int, step: Any, path: str, epochs: int) -> dict[str, Tensor]:
    """Train up to an epoch, from a file if there is one, and save."""
    module = models.Tied()
    before = path if Path(path).exists() else None
    run = trainer(max_epochs=epochs, **strategy_of(stages, step))
    run.fit(module, ckpt_path=before)
    run.save_checkpoint(path)
    return module.state_dict()


def test_resuming_with_other_stages_and_another_step(tmp_path: Path) -> None:
    whole = run_ranks(part, 1, 1, "mini-batch", str(tmp_path / "whole"), 4)[0]
    path = str(tmp_path / "parts")
    for epochs, (stages, step) in enumerate(
        [(2, "micro-batch"), (3, "micro-batch"), (2, "mini-batch"), (1, "micro-batch")], 1
    ):
        state = run_ranks(part, stages, stages, step, path, epochs)[0]
    torch.testing.assert_close(state, whole, rtol=0, atol=1e-10)
    saved = torch.load(path, weights_only=False)
    assert set(saved["state_dict"]) == set(whole)
    assert len(saved["optimizer_states"][0]["state"]) == len(list(models.Tied().parameters()))


def several(stages: int) -> list[Any]:
    """Evaluate before, fit twice with one Trainer, evaluate again, and train once more."""
    module, found = models.Language(), []
    run = trainer(max_epochs=1, **strategy_of(stages, virtual_stages=2))
    found.append(run.validate(module, verbose=False))
    run.fit(module)
    found.append(run.validate(module, verbose=False))
    run.fit_loop.max_epochs = 2
    run.fit(module)
    again = trainer(max_epochs=1, **strategy_of(stages, schedule="1f1b"))
    again.fit(module)
    return [*found, module.state_dict()]


def test_several_runs() -> None:
    expected = run_ranks(several, 1, 1)[0]
    for stages in (2, 3):
        found = run_ranks(several, stages, stages)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
