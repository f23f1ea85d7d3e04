"""A search for the largest batch: memory that runs out on one stage is a try that failed on all."""

from __future__ import annotations

import threading
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.training import trainer

LIMIT = 16  # samples of a mini-batch that fit
CHUNKS = 2


class Full(torch.autograd.Function):
    """Runs out of memory in the forward, or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: int, where: str) -> Tensor:
        ctx.fails = len(x) > limit and where == "backward"
        if len(x) > limit and where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return gradient, None, None


class Layer(nn.Linear):
    """Has room for so many samples, of a mini-batch or a micro-batch."""

    limit, where = LIMIT, ""

    def forward(self, x: Tensor) -> Tensor:
        return Full.apply(super().forward(x), self.limit, self.where)


class SmallAdam(torch.optim.Adam):
    """Has no room for the state of its first step."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
        return result


class Searching(models.Module):
    """Runs out of memory in a layer, calls the backbone twice, and chained."""

    def __init__(self, layer: int, where: str) -> None:
        self.layer, self.where = layer, where
        super().__init__("sgd")
        self.batch_size = 2

    def build(self) -> None:
        self.backbone = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(3)))
        if self.where != "optimizer":
            self.backbone[self.layer].where = self.where
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.backbone(self.before(x))) + self.backbone(x)

    def configure_optimizers(self) -> Any:
        self.small = SmallAdam(self.parameters(), lr=0.01)
        return self.small

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        stages = getattr(strategy, "stages", 1)
        is_here = stages == 1 or strategy.stage == min(self.layer, stages - 1)
        self.small.fails = self.where == "optimizer" and self.batch_size > LIMIT and is_here

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        data = torch.randn(200, WIDTH, dtype=torch.float64, generator=generator)
        return DataLoader([(row, row) for row in data], batch_size=self.batch_size)


def search(layer: int, where: str, mode: str, state: Any, by: str) -> tuple[int, Any]:
    """Search, and train with what was found; returns it and the weights."""
    module = Searching(layer, where)
    module.load_state_dict(state)
    options: dict[str, Any] = {"devices": 1}
    stages = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    if stages:
        for part in module.backbone:
            part.limit = LIMIT // CHUNKS
        options = {"devices": stages, "strategy": GPipeStrategy(CHUNKS)}
    arguments = {"mode": mode, "steps_per_trial": 1, "init_val": 4, "max_trials": 5}
    if by == "callback":
        options["callbacks"] = [BatchSizeFinder(**arguments)]
    run = trainer(**options, max_epochs=1, limit_train_batches=4)
    if by == "tuner":
        Tuner(run).scale_batch_size(module, **arguments)
    run.fit(module)
    return module.batch_size, module.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stages", "layer", "where", "mode", "by"),
    [
        (1, 1, "backward", "power", "callback"),
        (1, 1, "optimizer", "power", "callback"),
        (2, 0, "forward", "binsearch", "tuner"),
        (3, 1, "forward", "power", "callback"),
        (2, 2, "forward", "power", "callback"),
        (3, 1, "backward", "binsearch", "tuner"),
        (3, 2, "backward", "power", "callback"),
        (2, 2, "optimizer", "power", "callback"),
    ],
)
def test_the_same_batch_is_found_as_on_one_device(
    stages: int, layer: int, where: str, mode: str, by: str
) -> None:
    torch.manual_seed(0)
    state = Searching(layer, where).state_dict()
    size, weights = search(layer, where, mode, state, by)
    assert LIMIT / 2 <= size <= LIMIT
    found = run_ranks(search, stages, layer, where, mode, state, by)
    assert [other for other, _ in found] == [size] * stages
    torch.testing.assert_close(found[0][1], weights, rtol=0, atol=1e-10)
    assert run_ranks(watchdogs, stages) == [0] * stages, "every run has ended, a Tuner's, too"


def watchdogs() -> int:
    return sum(thread.name == "gpipe-watchdog" for thread in threading.enumerate())


def begin(chunks: Any) -> None:
    finder: list[L.Callback] = [BatchSizeFinder()]
    strategy = GPipeStrategy(chunks)
    trainer(devices=2, strategy=strategy, callbacks=finder).fit(Searching(0, "forward"))


def test_the_number_of_micro_batches_must_be_chosen() -> None:
    with pytest.raises(RankError, match=r"give GPipeStrategy\(chunks=...\) a number"):
        run_ranks(begin, 2, "auto")
