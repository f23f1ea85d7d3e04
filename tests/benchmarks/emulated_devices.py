"""Step time on emulated devices against the schedule's bound.

Every stage is one layer that sleeps, so that any number of stages runs truly in parallel on few
cores: 5 ms forward and 10 ms backward per micro-batch. How long a sleep really takes is measured in
the same run, on every rank; the schedule's simulator turns these times into the bound. Run it with

    python -m tests.benchmarks.emulated_devices --stages 4 --chunks 8 --checkpoint always
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import fill_drain
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import simulate

FORWARD_S, BACKWARD_S = 0.005, 0.010
WIDTH = 64


class _Sleep(torch.autograd.Function):
    """Multiplies by a weight in the time that it is told, and notes how long it really took."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, log: dict[str, list[float]]) -> Tensor:
        start = time.perf_counter()
        ctx.save_for_backward(x, weight)
        ctx.log = log
        y = x * weight
        time.sleep(FORWARD_S)
        log["F"].append(time.perf_counter() - start)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        start = time.perf_counter()
        x, weight = ctx.saved_tensors
        gradients = gradient * weight, (gradient * x).sum(0), None
        time.sleep(BACKWARD_S)
        ctx.log["B"].append(time.perf_counter() - start)
        return gradients


class SleepingLayer(nn.Module):
    """A device's work on one micro-batch; notes how long it really took."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.log: dict[str, list[float]] = {"F": [], "B": []}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self.weight, self.log)
        return result


class SleepingModule(L.LightningModule):
    """A backbone of sleeping layers; notes the length of every step."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(SleepingLayer() for _ in range(stages)))
        self.steps: list[float] = []
        self._start = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(batch[0]).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(time.perf_counter() - self._start)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(stages: int, chunks: int, checkpoint: str, steps: int) -> dict[str, float]:
    """Train on emulated devices, on every rank.

    Returns:
        The median step and the bound, in seconds, and their ratio; ``efficiency`` is 1 at the
        bound.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = SleepingModule(stages)
    layers = list(module.backbone)
    data = DataLoader(TensorDataset(torch.ones(4 * chunks * steps, WIDTH)), batch_size=4 * chunks)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=GPipeStrategy(chunks, checkpoint=checkpoint, balance=[1] * stages),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    own = layers[torch.distributed.get_rank()].log
    times: list[Any] = [None] * stages
    torch.distributed.all_gather_object(
        times, [statistics.mean(own["F"]), statistics.mean(own["B"])]
    )
    forward, backward = [t[0] for t in times], [t[1] for t in times]
    schedule = fill_drain(rounds(stages), chunks, checkpoint)  # type: ignore[arg-type]
    bound = simulate(schedule, Costs.of(forward, backward)).length
    step = statistics.median(module.steps[2:])
    return {
        "stages": stages,
        "chunks": chunks,
        "step_s": round(step, 4),
        "bound_s": round(bound, 4),
        "efficiency": round(bound / step, 3),
        "forward_s": round(statistics.mean(forward), 5),
        "backward_s": round(statistics.mean(backward), 5),
    }


def main() -> None:
    """Measure, and print the result on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument(
        "--checkpoint", default="always", choices=["always", "except_last", "never"]
    )
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    result = measure(arguments.stages, arguments.chunks, arguments.checkpoint, arguments.steps)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"checkpoint": arguments.checkpoint, **result}))


if __name__ == "__main__":
    main()
