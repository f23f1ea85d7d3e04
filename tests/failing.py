"""Trains a pipeline that fails in a given place, on a given rank.

Run as a script it uses Lightning's own launcher::

    python -m tests.failing --ranks 4 --rank 2 --where layer
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.failure.deadlines import Deadlines

#: Where it may fail; the loader is read on the first stage alone.
PLACES = ("layer", "step", "loader", "callback", "hook", "optimizer", "save")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
STEP = 3  # the step in which it fails


class Broken(Exception):
    """What goes wrong."""


def fail(where: str) -> None:
    """Fail on this rank."""
    if where in SIGNALS:
        os.kill(os.getpid(), SIGNALS[where])
        time.sleep(60)  # a signal may come at any time; it must come now
    elif where == "exit":
        os._exit(3)
    elif where == "sleep":
        time.sleep(600)
    raise Broken(f"broken in {where}")


class Endless(IterableDataset[Any]):
    def __init__(self, where: str, rank: int) -> None:
        self.where, self.rank = where, rank

    def __iter__(self) -> Iterator[Tensor]:
        for n in range(10**9):
            if n == STEP and self.where == "loader" and int(os.environ["LOCAL_RANK"]) == self.rank:
                fail(self.where)
            yield torch.randn(6)


class Failing(L.LightningModule):
    """Fails in one of its places, on one rank."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.where, self.rank = where, rank
        outer = self

        class Layer(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                outer.check("layer")
                return torch.tanh(super().forward(x))

        self.backbone = nn.Sequential(*(Layer(6, 6) for _ in range(8)))
        self.step = 0

    def check(self, place: str) -> None:
        own = self.where if self.where in PLACES else "step"
        if self.step >= STEP and place == own and self.trainer.global_rank == self.rank:
            fail(self.where)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step = batch_idx
        loss = self.backbone(batch).square().mean()
        self.check("step")
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.check("hook")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check("save")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        outer = self

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                outer.check("optimizer")
                return result

        return Optimizer(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(self.where, self.rank), batch_size=8)


class Callback(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.check("callback")
        if module.where == "alone" and trainer.global_rank == module.rank:
            module.backbone(torch.zeros(4, 6))


class Strategy(GPipeStrategy):
    deadlines = Deadlines(stall_s=3.0)


def run(where: str, rank: int, ranks: int, folder: str, start: Any = "popen") -> None:
    """Train until it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    warnings.simplefilter("ignore")
    module = Failing(where, rank)
    callbacks: list[Any] = [Callback()]
    if where == "save":
        callbacks.append(L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=Strategy(4, balance="params", start_method=start),
        max_steps=10**6,
        logger=False,
        enable_checkpointing=where == "save",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    print(f"\nprocess {os.getpid()} is local rank {trainer.local_rank}", flush=True)
    trainer.fit(module)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument(
        "--where", choices=(*PLACES, *SIGNALS, "exit", "sleep", "alone"), default="step"
    )
    parser.add_argument("--start", default="popen")
    parser.add_argument("--folder", default="checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(*(getattr(arguments, name) for name in ("where", "rank", "ranks", "folder", "start")))
    sys.exit(0)
