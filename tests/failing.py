"""Trains a pipeline that fails in a given place, on a given rank.

Run as a script it uses Lightning's own launcher::

    python -m tests.failing --ranks 4 --rank 2 --where layer
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.failure.deadlines import Deadlines
from tests.training import QUIET

#: Where it may fail in a step.
PLACES = ("layer", "step", "callback", "hook", "optimizer", "save")
#: Where it may fail on the first stage alone, which reads, prepares data and logs.
FIRST = ("loader", "worker", "prepare_data", "logger")
#: Where it may fail before the first step.
BEFORE = ("setup", "configure_model", "configure_optimizers")
#: Where it may fail after the last step.
AFTER = ("fit_end", "teardown")
SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "term": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
#: What it may do in a step.
HOSTILE = ("exit", "sysexit", "unreadable", "huge", "thread", "alone")
#: How it may leave a script, before its Trainer or between two.
AROUND = ("leaves before", "leaves between")
STEP = 3  # the step in which it fails


class Broken(Exception):
    """What goes wrong."""


class Unreadable(Exception):
    """An error whose message can't be read, and which doesn't pickle."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise ValueError("no message")


def fail(where: str) -> None:
    """Fail on this rank."""
    if where in SIGNALS:
        os.kill(os.getpid(), SIGNALS[where])
        time.sleep(60)  # a signal may come at any time; it must come now
    elif "to save" in where:
        number = SIGNALS[where.split()[0]]
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # as a process group gets it, and a launcher passes it on
        if "twice" not in where:
            return
        time.sleep(0.7)
        os.kill(os.getpid(), number)
    elif where == "exit":
        os._exit(3)
    elif where == "sysexit":
        sys.exit(0)
    elif where == "sleep":
        time.sleep(600)
    elif where == "unreadable":
        raise Unreadable
    elif where == "huge":
        raise Broken(f"\x1b[2Jbroken in huge {'x' * 10**6}")
    elif where == "logger":
        raise OSError(errno.ENOSPC, "broken in logger: No space left on device")
    elif where == "thread":
        with ThreadPoolExecutor() as threads:
            threads.submit(fail, "another thread").result()
    raise Broken(f"broken in {where}")


class Endless(IterableDataset[Any]):
    def __init__(self, where: str, rank: int) -> None:
        self.where, self.rank = where, rank

    def __iter__(self) -> Iterator[Tensor]:
        own = self.where in ("loader", "worker") and int(os.environ["LOCAL_RANK"]) == self.rank
        for n in range(10**9):
            if n == 8 * STEP and own:
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
        self.step, self.failed = 0, False

    def check(self, place: str) -> None:
        anywhere = (*PLACES, *FIRST, *BEFORE, *AFTER)
        own = self.where if self.where in anywhere else "step"
        late = self.step >= STEP or place in (*BEFORE, "prepare_data")
        if late and place == own and self.trainer.global_rank == self.rank and not self.failed:
            self.failed = True
            fail(self.where)

    def prepare_data(self) -> None:
        self.check("prepare_data")

    def setup(self, stage: str) -> None:
        self.check("setup")

    def configure_model(self) -> None:
        self.check("configure_model")

    def on_fit_end(self) -> None:
        self.check("fit_end")

    def teardown(self, stage: str) -> None:
        self.check("teardown")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step = batch_idx
        loss = self.backbone(batch).square().mean()
        self.check("step")
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.check("hook")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check("save")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        outer = self
        self.check("configure_optimizers")

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                outer.check("optimizer")
                return result

        return Optimizer(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        if self.where == "term early" and self.trainer.global_rank == self.rank:
            fail("term")
        return DataLoader(
            Endless(self.where, self.rank),
            batch_size=8,
            num_workers=int(self.where == "worker"),
        )


class Callback(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.check("callback")
        if module.where == "alone" and trainer.global_rank == module.rank:
            module.backbone(torch.zeros(4, 6))


class FullDisk(DummyLogger):
    """Writes to a disk that gets full."""

    def __init__(self, module: Failing) -> None:
        super().__init__()
        self.module = module

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.module.check("logger")


class Strategy(GPipeStrategy):
    deadlines = Deadlines(stall_s=3.0)


def run(
    where: str, rank: int, ranks: int, folder: str, start: Any = "popen", more: Any = ()
) -> None:
    """Train until it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", "While the Trainer runs")
    module = Failing(where, rank)
    callbacks: list[Any] = [Callback(), *more]
    if "to save" in where:
        callbacks.append(L.pytorch.callbacks.OnExceptionCheckpoint(folder))
        callbacks.append(L.pytorch.callbacks.ModelCheckpoint(folder, save_on_exception=True))
    if where == "save":
        callbacks.append(L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1))
    trainer = L.Trainer(
        accelerator=QUIET["accelerator"],
        devices=ranks,
        strategy=Strategy(4, balance="params", start_method=start),
        max_steps=STEP + 2 if where in AFTER else 10**6,
        logger=FullDisk(module) if where == "logger" else False,
        log_every_n_steps=1,
        enable_checkpointing=where == "save" or "to save" in where,
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
        "--where",
        choices=(*PLACES, *FIRST, *BEFORE, *AFTER, *SIGNALS, *HOSTILE, *AROUND, "none"),
        default="step",
    )
    parser.add_argument("--start", default="popen")
    parser.add_argument("--folder", default="checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if arguments.where == "leaves before" and local_rank == arguments.rank:
        sys.exit(0)
    if arguments.where == "leaves between":
        run("fit_end", -1, arguments.ranks, arguments.folder)
        if local_rank == arguments.rank:
            sys.exit(0)
    run(*(getattr(arguments, name) for name in ("where", "rank", "ranks", "folder", "start")))
    sys.exit(0)
