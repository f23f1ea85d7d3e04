"""Compares the memory that stages are expected to hold with what they hold.

A pipeline trains on several processes; in its fifth step every rank notes the bytes of the tensors
that live at one time, with the batch, where the backbone is given it, and the memory of messages
that is used again in every step. A searched schedule stays the one that is planned: nothing is
measured for another. The whole table, K = 1, 2, 4, M = 1, 4, 16, all checkpoints and both step
modes, for five models, takes some minutes:

    python -m tests.expected_memory
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm.packet import Packet
from lightning_gpipe.pipeline.measuring import Measuring
from lightning_gpipe.plan.model_memory import ExpectedMemory
from lightning_gpipe.plan.planner import Planner
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.strategy.exchange import Exchange
from tests.live_bytes import LiveBytes, bytes_of
from tests.ranks import run_ranks
from tests.training import trainer

BATCH = 32


class Loss(torch.autograd.Function):
    """Keeps its input, and makes nothing but its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum() / x.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0]).fill_(gradient / 1000)


class Transformer(L.LightningModule):
    """Encoder layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Linear(16, 64)
        self.backbone = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(8))
        )
        self.data = torch.randn(BATCH * 5, 32, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.backbone(self.embedding(batch[0]))
        loss: Tensor = Loss.apply(output)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.data), batch_size=BATCH)


class ConvNet(Transformer):
    """Convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Identity()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            )

        widths = [3, 8, 8, 8, 8, 16, 16, 16, 16]
        self.backbone = nn.Sequential(*itertools.starmap(block, itertools.pairwise(widths)))
        self.data = torch.randn(BATCH * 5, 3, 24, 24)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Language(Transformer):
    """GPT-2 as Hugging Face wrote it."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2Model

        super().__init__()
        del self.embedding, self.backbone
        config = GPT2Config(
            vocab_size=64, n_positions=32, n_embd=64, n_layer=8, n_head=4, use_cache=False
        )
        self.model: nn.Module = GPT2Model(config)
        self.data = torch.randint(0, 64, (BATCH * 5, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.model(input_ids=batch[0]).last_hidden_state
        loss: Tensor = Loss.apply(output)
        return loss


class Tied(Language):
    """GPT-2 with its head, whose logits take more memory than the blocks."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=2000, n_positions=32, n_embd=64, n_layer=8, n_head=4, use_cache=False
        )
        self.model = GPT2LMHeadModel(config)
        self.data = torch.randint(0, 2000, (BATCH * 5, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss


class Wide(nn.Module):
    """Two layers with much between them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(before, 512), nn.Linear(512, after)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.second(self.first(x).relu()), 0.1)


class Around(Transformer):
    """Encoder layers between others that take more memory than they."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = Wide(16, 64), Wide(64, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.head(self.backbone(self.embedding(batch[0])))
        return nn.functional.mse_loss(output, batch[0])


MODELS = {
    "Transformer": Transformer,
    "ConvNet": ConvNet,
    "GPT-2": Language,
    "GPT-2 with its head": Tied,
    "Transformer between layers": Around,
}


class Watch(L.Callback):
    """Measures the first step and the last, up to the optimizer's.

    Args:
        is_given_batch: Whether the backbone's input is the batch, which every step's begin finds.
    """

    def __init__(self, is_given_batch: bool = False) -> None:
        self._is_given_batch = is_given_batch
        self.peaks: list[int] = []
        self.kept: tuple[int, int] = (0, 0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.live = LiveBytes()
        if self._is_given_batch and trainer.global_rank == 0:
            self.live.add(batch)
        self.live.add(found.buffer for found in gc.get_objects() if type(found) is Packet)
        self.live.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.live.__exit__(None, None, None)
        own = [p for p in module.parameters() if not p.is_meta]
        self.peaks.append(self.live.peak([p.grad for p in own if p.grad is not None]))
        weights = bytes_of([*own, *module.buffers(), *(p.grad for p in own if p.grad is not None)])
        states = [optimizer.state.get(p, {}).values() for p in own]
        self.kept = weights, bytes_of(t for state in states for t in state if torch.is_tensor(t))


def measure(
    name: str, stages: int, chunks: int, checkpoint: Checkpoint, mode: tuple[Any, Any]
) -> tuple[list[int], tuple[int, int]]:
    """Train on a rank, and return what it held."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    module = MODELS[name]()
    watch = Watch(name == "ConvNet" and mode[0] == "mini-batch")
    strategy = GPipeStrategy(
        chunks, checkpoint=checkpoint, step=mode[0], schedule=mode[1], stages=stages
    )
    # what looks hold for a moment isn't planned: it is a few times 1 million numbers at most
    looks = patch.object(Exchange, "is_due", return_value=False)
    with patch.object(Measuring, "end_mini_batch"), looks:
        trainer(max_steps=5, devices=stages, strategy=strategy, callbacks=[watch]).fit(module)
    return [watch.peaks[0], watch.peaks[-1]], watch.kept


def planned(
    name: str, stages: int, chunks: int, checkpoint: Checkpoint, mode: tuple[Any, Any]
) -> ExpectedMemory:
    """What a plan says of all stages, of the first step and of others."""
    found: list[Any] = []
    plan_one = Planner._planned

    def noted(planner: Planner, settings: Any, replicas: int, fitted: Any) -> Any:
        found.append(fitted.memory)
        return plan_one(planner, settings, replicas, fitted)

    module = MODELS[name]()
    with patch.object(Planner, "_planned", noted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few samples for batch norm
        plans = GPipeStrategy(chunks, step=mode[0], schedule=mode[1]).plan(
            module,
            next(iter(module.train_dataloader())),
            devices=stages,
            stages=[stages],
            virtual_stages=[1],
            checkpoint=[checkpoint],
            device="cpu",
        )
    assert plans.all[0].counts_step
    (memory,) = found
    return memory


CHECKPOINTS: tuple[Checkpoint, ...] = ("always", 2, "never")
STEPS = (("mini-batch", "auto"), ("micro-batch", "1f1b"), ("micro-batch", "searched"))


Cell: TypeAlias = tuple[str, int, int, Checkpoint, tuple[Any, Any]]


def grid() -> Iterator[Cell]:
    """The whole table: model, K, M, checkpoint, step and schedule."""
    return itertools.product(MODELS, (1, 2, 4), (1, 4, 16), CHECKPOINTS, STEPS)


def rows(cell: Cell) -> Iterator[tuple[str, float, float]]:
    """What was expected and measured of each stage, as a row of a table.

    Yields:
        The row, the error of what comes and goes in a step, and in the first one.
    """
    name, stages, chunks, checkpoint, (step, schedule) = cell
    found, expected = run_ranks(measure, stages, *cell), planned(*cell)
    for stage, ((first, last), kept) in enumerate(found):
        memory = expected.in_step[stage]
        assert kept == (memory.weights + memory.gradients, memory.optimizer)
        error = memory.of_micro_batches / last - 1
        beside = expected.in_first_step[stage].of_micro_batches / first - 1
        mode = step if schedule == "auto" else f"{step} {schedule}"
        cells = [name, mode, stages, chunks, checkpoint, stage, memory.of_micro_batches // 1000]
        row = [*map(str, cells), str(last // 1000), f"{error:+.1%}", f"{beside:+.1%}"]
        yield f"| {' | '.join(row)} |", error, beside


def main(words: Sequence[str]) -> None:
    """Print the table, or the rows whose cells have all given words in their text."""
    print("| model | step | K | M | checkpoint | stage | kB | measured | error | in first step |")
    print("|---" * 10 + "|")
    errors = []
    for cell in grid():
        if all(word in str(cell) for word in words):
            for row, error, _ in rows(cell):
                print(row, flush=True)
                errors.append(error)
    within = sum(abs(error) <= 0.15 for error in errors)
    print(f"{within} of {len(errors)} within 15 %; from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="what rows must have in their text, as 'never'")
    main(parser.parse_args().words)
