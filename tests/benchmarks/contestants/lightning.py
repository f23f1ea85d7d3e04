"""This package through the Trainer, in both step modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_gpipe import GPipeStrategy
from tests.benchmarks.turns import Contestant, Turn
from tests.benchmarks.workloads import Workload, notes

LR = 1e-3


class Module(L.LightningModule):
    """A backbone with the loss behind it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.backbone = nn.Sequential(*workload.layers())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.workload.loss(self.backbone(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=LR)


class Turns(L.Callback):
    """Waits for the turns of this contestant."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._left = turn, 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, GPipeStrategy):
            self._turn.under_way = lambda: strategy._connected.groups.nearby.nbytes

    def on_train_batch_start(self, *_: Any) -> None:
        if not self._left:
            self._left = self._turn.next()
        self._left -= 1


class Same(Dataset[Any]):
    """The same mini-batch again and again, made by who reads it first."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = cache(make)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        return self._make()


def gpipe(
    workload: Workload,
    stages: int,
    chunks: int,
    checkpoint: Any,
    name: str = "",
    callbacks: Callable[[], list[L.Callback]] = list,
    **options: Any,
) -> Contestant:
    """This package.

    Args:
        workload: What is trained.
        stages: K.
        chunks: M.
        checkpoint: As the strategy's.
        name: For the table.
        callbacks: Makes the Trainer's, beside what takes turns.
        options: Of the strategy.
    """
    options.setdefault("balance", [*workload.balance(stages * options.get("virtual_stages", 1))])
    name = name or f"lightning-gpipe, {options.get('step', 'mini-batch')} step"
    strategy = partial(GPipeStrategy, chunks, checkpoint=checkpoint, **options)
    return Contestant(name, partial(_train, workload, chunks, strategy, callbacks), stages)


def _train(
    workload: Workload,
    chunks: int,
    strategy: Any,
    callbacks: Callable[[], list[L.Callback]],
    turn: Turn,
) -> None:
    turn.notes.append(notes)
    L.Trainer(
        accelerator="cpu",
        devices=turn.world_size,
        strategy=strategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks(), Turns(turn)],
    ).fit(Module(workload), DataLoader(Same(partial(workload.batch, chunks)), batch_size=None))
