"""What a rank really holds of activations is what its schedule's simulation says."""

from __future__ import annotations

import gc
from array import array
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.one_f_one_b import one_f_one_b
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import peak_graphs
from tests.ranks import run_ranks
from tests.training import train

MICRO_BATCHES, STAGES, VIRTUAL = 6, 3, 2
PLACEMENT = rounds(STAGES, VIRTUAL)


NOW, MOST = 0, 1
COUNTS = array("l", [0, 0])  # what passes and recomputes count elsewhere is put back


class Held:
    """Lives as long as a graph."""

    def __init__(self) -> None:
        COUNTS[NOW] += 1
        COUNTS[MOST] = max(COUNTS)

    def __del__(self) -> None:
        COUNTS[NOW] -= 1


class Add(torch.autograd.Function):
    """Adds a weight, and holds what it is given until its graph is gone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: Held | None) -> Tensor:
        ctx.held = held
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.sum(0), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Add.apply(x, self.weight, Held() if torch.is_grad_enabled() else None)
        return result


class Module(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Layer() for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.backbone(batch)
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.ones(3, 2 * MICRO_BATCHES, 4)


class Watch(L.Callback):
    """Counts what steps hold at most; Python collects no garbage."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.most: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        gc.disable()
        COUNTS[MOST] = 0
        self.left.append(COUNTS[NOW])

    def on_train_batch_end(self, *_: Any) -> None:
        self.most.append(COUNTS[MOST])

    def on_train_end(self, *_: Any) -> None:
        gc.enable()


def counted(
    checkpoint: Checkpoint, stages: int = STAGES, virtual: int = VIRTUAL, **options: Any
) -> Watch:
    """What steps of a rank hold."""
    watch, layers = Watch(), stages * virtual
    strategy = GPipeStrategy(
        MICRO_BATCHES,
        stages=stages,
        virtual_stages=virtual,
        checkpoint=checkpoint,
        balance=[1] * layers,
        **options,
    )
    train(Module(layers), max_epochs=1, devices=stages, strategy=strategy, callbacks=[watch])
    return watch


def held(checkpoint: Checkpoint, **options: Any) -> tuple[int, int]:
    """How many a rank held at most in a step, and how many were left after one."""
    watch = counted(checkpoint, **options)
    return watch.most[-1], watch.left[-1]  # of the last step: the first one cuts the module


@pytest.mark.parametrize("checkpoint", ["always", "except_last", 0.5, "never"])
def test_mini_batch_step(checkpoint: Checkpoint) -> None:
    said = fill_drain(PLACEMENT, MICRO_BATCHES, checkpoint)
    found = run_ranks(held, STAGES, checkpoint)
    assert found == [(peak_graphs(program), 0) for program in said.programs]


def in_micro_batches(checkpoint: Checkpoint, schedule: str) -> tuple[int, int]:
    return held(checkpoint, step="micro-batch", schedule=schedule)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_micro_batch_step(checkpoint: Checkpoint, schedule: str) -> None:
    if schedule == "1f1b":
        said = one_f_one_b(PLACEMENT, MICRO_BATCHES, checkpoint)
    else:
        said = fill_drain(PLACEMENT, MICRO_BATCHES, checkpoint, ascending=True)
    found = run_ranks(in_micro_batches, STAGES, checkpoint, schedule)
    assert found == [(peak_graphs(program), 0) for program in said.programs]


def in_all_steps(stages: int, virtual: int, checkpoint: Checkpoint) -> list[int]:
    return counted(checkpoint, stages, virtual, step="micro-batch", schedule="1f1b").most


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_first_step_holds_no_more_than_others(checkpoint: Checkpoint) -> None:
    said = one_f_one_b(rounds(STAGES), MICRO_BATCHES, checkpoint)
    found = run_ranks(in_all_steps, STAGES, STAGES, 1, checkpoint)
    assert found == [[peak_graphs(program)] * 3 for program in said.programs]


@pytest.mark.parametrize(("checkpoint", "most"), [("always", 1), ("never", 2)])
def test_one_rank_holds_one_micro_batch(checkpoint: Checkpoint, most: int) -> None:
    assert run_ranks(in_all_steps, 1, 1, 2, checkpoint) == [[most] * 3]  # of two stages
