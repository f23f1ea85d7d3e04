"""Running a Trainer quietly."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch

DEVICE = "cuda" if "GPU_SUITE" in os.environ else "cpu"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(**options: Any) -> L.Trainer:
    """A Trainer that says and writes nothing unless told to."""
    return L.Trainer(**{**QUIET, **options})


def train(module: L.LightningModule, data: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Train a module, and return its state: the whole module's on rank 0."""
    trainer(**options).fit(module, data)
    return module.state_dict()


if DEVICE == "cuda":  # python -m tests.gpu --only suite-nccl
    from tests.gpu.one_gpu import take_over

    QUIET["accelerator"] = take_over(os.environ["GPU_SUITE"])
