"""M is chosen with the batch in sight, and what runs is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.plan.chunks import decide_chunks, micro_batches
from lightning_gpipe.plan.settings import Settings
from tests import models
from tests.ranks import start_ranks
from tests.training import trainer

PLAIN = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
NORMALIZED = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
SAID = []


def decide(chosen: Any, body: nn.Module, samples: int) -> int:
    SAID.clear()
    settings = Settings(chosen, 2, None, "flops", "always", True)
    bound = 8 if chosen == "auto" else chosen
    return decide_chunks(bound, settings, body, torch.zeros(samples, 6), SAID.append)


@pytest.mark.parametrize(
    ("chosen", "body", "samples", "expected", "warns"),
    [
        ("auto", PLAIN, 16, 8, False),
        ("auto", PLAIN, 5, 5, False),
        ("auto", NORMALIZED, 64, 8, False),
        ("auto", NORMALIZED, 16, 4, False),
        ("auto", NORMALIZED, 3, 1, False),
        (8, NORMALIZED, 16, 8, True),
        (100, PLAIN, 16, 100, False),
        (100, NORMALIZED, 16, 100, True),
        (4, NORMALIZED, 16, 4, False),
    ],
)
def test_batch_norm_keeps_samples_to_normalise_by(
    chosen: Any, body: nn.Module, samples: int, expected: int, warns: bool
) -> None:
    assert decide(chosen, body, samples) == expected
    assert bool(SAID) == warns
    assert all(f"choose chunks={samples // 4} or a larger batch" in text for text in SAID)


def test_there_are_no_more_micro_batches_than_samples() -> None:
    assert micro_batches(100, torch.zeros(16, 2)) == 16
    assert micro_batches(100, None) == 100


class Plain(models.Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)


class Normalized(Plain):
    samples = 16

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


def fit(kind: str, chunks: Any) -> tuple[int, int]:
    made = Normalized() if kind == "normalized" else Plain()
    strategy = GPipeStrategy(chunks)
    run = trainer(devices=2, strategy=strategy, max_steps=1)
    before = strategy.chunks
    run.fit(made)
    run.validate(made, made.train_dataloader(), verbose=False)  # prints the same table, so nothing
    return before, strategy.chunks


def fits() -> None:
    assert fit("normalized", "auto") == (8, 4)
    assert fit("plain", 100) == (100, 100)


def test_the_strategy_tells_what_runs(tmp_path: Path) -> None:
    for process in start_ranks(fits, 2, tmp_path):
        process.join(60)
    said = (tmp_path / "0").read_text()
    assert process.exitcode == 0, said
    assert said.count("on 2 stages, 4 micro-batches") == 1
    assert said.count("on 2 stages, 8 micro-batches") == 1
