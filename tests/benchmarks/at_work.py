"""Share of the time that emulated devices are at work, with ``step="micro-batch"``.

Each virtual stage is one layer that sleeps: its forward and its recompute one unit, the gradient of
its input one and that of its weight one. So any number of stages runs truly in parallel on few
cores. The Trainer measures what the layers take, and searches for the schedule, as for any module.
How long a unit really is, is measured in the same run.

``at_work`` is the share of a step that M micro-batches' forwards, recomputes and backwards take on
one device, as peers' figures count it. ``slept`` is the share in which a device did something: less
where a micro-batch's backward follows its forward at once, because then nothing is recomputed.
``peers`` are those shares of other packages' schedules, of steps that were measured apart from this
run on a like machine, without a Trainer, with stages that sleep 5 ms forward and 10 ms backward.
Run it with

    python -m tests.benchmarks.at_work --stages 4 --chunks 8 --virtual 2 --checkpoint always
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

WIDTH = 16
#: Milliseconds of a step of other packages, by stages, micro-batches and recompute.
PEERS: dict[tuple[int, int, str], dict[str, float]] = {
    (4, 8, "always"): {"GPipe": 259, "1F1B": 251, "Interleaved1F1B": 217, "DeepSpeed": 247},
    (4, 32, "always"): {"GPipe": 790, "1F1B": 762, "Interleaved1F1B": 784, "DeepSpeed": 812},
    (8, 32, "always"): {"GPipe": 919, "1F1B": 903, "Interleaved1F1B": 881, "DeepSpeed": 948},
    (4, 8, "never"): {"GPipe": 188, "1F1B": 186, "DeepSpeed": 194, "ZBV": 138},
    (4, 32, "never"): {"GPipe": 582, "1F1B": 567, "DeepSpeed": 597, "ZBV": 556},
    (8, 32, "never"): {"GPipe": 684, "1F1B": 674, "DeepSpeed": 674, "ZBV": 619},
}
#: Milliseconds that a stage slept there for a micro-batch, as measured.
PEERS_WORK_MS = {"always": 21.9, "never": 15.9}
WARM_UP = 6  # mini-batches until the schedule is found for what was measured


class _Device:
    """Sleeps in the place of a device, and adds up for how long."""

    unit_s = 0.02
    slept_s = 0.0
    units = 0

    @classmethod
    def work(cls) -> None:
        start = time.perf_counter()
        time.sleep(cls.unit_s)
        cls.slept_s += time.perf_counter() - start
        cls.units += 1


class _Input(torch.autograd.Function):
    """A forward, and the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Device.work()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Device.work()
        return gradient.clone()


class _Weight(torch.autograd.Function):
    """The gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Device.work()
        return gradient.clone()


class Layer(nn.Module):
    """A virtual stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Input.apply(x) * _Weight.apply(self.weight)
        return result


class Module(L.LightningModule):
    """A backbone of such layers; notes of every step how long it took and slept, and a unit."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*(Layer() for _ in range(layers)))
        self.steps: list[tuple[float, float, float]] = []
        self._start = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(self.embed(batch[0])).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._start, _Device.slept_s, _Device.units = time.perf_counter(), 0.0, 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, slept = time.perf_counter() - self._start, _Device.slept_s
        self.steps.append((step, slept, slept / _Device.units))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure(stages: int, chunks: int, virtual: int, checkpoint: Any, steps: int) -> dict[str, Any]:
    """Train on emulated devices, on every rank.

    Returns:
        The median step in seconds, and the shares of it, the means over devices.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, batch = Module(stages * virtual), 2 * chunks
    data = TensorDataset(torch.ones(batch * (WARM_UP + steps), WIDTH))
    strategy = GPipeStrategy(
        chunks,
        checkpoint=checkpoint,
        virtual_stages=virtual,
        balance=[1] * stages * virtual,
        step="micro-batch",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch))
    found: list[Any] = [None] * stages
    units = chunks * virtual * (3 if checkpoint == "never" else 4)
    steps_s, slept_s, unit_s = zip(*module.steps[WARM_UP:], strict=True)
    shares = [
        (slept / s, units * u / s) for s, slept, u in zip(steps_s, slept_s, unit_s, strict=True)
    ]
    own = [statistics.median(column) for column in zip(*shares, strict=True)]
    torch.distributed.all_gather_object(found, own)
    return {
        "stages": stages,
        "chunks": chunks,
        "virtual_stages": virtual,
        "checkpoint": checkpoint,
        "step_s": round(statistics.median(steps_s), 3),
        "at_work": round(statistics.mean(share for _, share in found), 3),
        "slept": round(statistics.mean(share for share, _ in found), 3),
        "peers": {
            name: round(chunks * PEERS_WORK_MS[checkpoint] / step_ms, 3)
            for name, step_ms in PEERS.get((stages, chunks, checkpoint), {}).items()
        },
    }


def main() -> None:
    """Measure, and print the result on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--virtual", type=int, default=2)
    parser.add_argument("--checkpoint", default="always", choices=["always", "never"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--unit", type=float, default=50.0, help="milliseconds of a unit")
    arguments = parser.parse_args()
    _Device.unit_s = arguments.unit / 1e3
    result = measure(
        arguments.stages,
        arguments.chunks,
        arguments.virtual,
        arguments.checkpoint,
        arguments.steps,
    )
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
