"""Trains a module on two stages and saves its weights, however its processes are started."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import lightning as L
import torch

from lightning_gpipe import GPipeStrategy
from tests.models import Around
from tests.training import QUIET


def main(start_method: str, nodes: int, out: str, epochs: int = 1) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    module = Around()
    strategy = GPipeStrategy(3, stages=2, start_method=start_method)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator=QUIET["accelerator"],
        devices=2 // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=Path(out).parent,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        torch.save((module.state_dict(), dict(trainer.callback_metrics)), out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
