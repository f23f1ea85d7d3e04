"""What is trained on GPUs: several stages may share one."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.training import trainer

RECOMPUTE = ("always", "except_last", "never")


class OneGPU(CUDAAccelerator):
    """Lets all processes of a node use its first GPU."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0] * int(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]


class Packed(models.Module):
    """Its layers want the lengths of sequences in host memory, all else on the GPU."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(models.WIDTH, models.WIDTH, batch_first=True)

        def forward(self, value: Any) -> Any:
            x, lengths = value
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.rnn(packed)[0], True, total_length=x.shape[1])[
                0
            ], lengths

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.Layer() for _ in range(3)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.arange(len(x), device="cpu") % 4 + 1
        output, _ = self.backbone((x.unsqueeze(1).expand(-1, 4, -1), lengths))
        return nn.functional.mse_loss(output.mean(1), y)


class Wide(models.Module):
    """Activations that take more memory than weights."""

    samples = 2048

    def build(self) -> None:
        width = 1024
        blocks = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
        self.backbone = nn.Sequential(
            nn.Linear(models.WIDTH, width), *blocks, nn.Dropout(0.1), nn.Linear(width, models.WIDTH)
        )


def weights(
    kind: type[models.Module],
    stages: int | None,
    recompute: Any = "except_last",
    backend: str | None = None,
    default_device: str | None = None,
    chunks: int = 4,
) -> dict[str, Tensor]:
    """Train on this rank; returns the weights in host memory.

    Args:
        kind: The module.
        stages: K, all on the first GPU unless the backend is NCCL; None: a plain Trainer.
        recompute: Which micro-batches are re-materialized.
        backend: Of the process groups.
        default_device: The default device of the run.
        chunks: M.
    """
    torch.manual_seed(1)
    module = kind()
    strategy: Any = "auto"
    if stages is not None:
        strategy = GPipeStrategy(chunks, checkpoint=recompute, process_group_backend=backend)
    accelerator = "gpu" if backend == "nccl" else OneGPU()
    run = trainer(max_steps=4, devices=stages or 1, strategy=strategy, accelerator=accelerator)
    torch.set_default_device(default_device)
    try:
        run.fit(module)
    finally:
        torch.set_default_device(None)
    return {name: value.cpu() for name, value in copy.deepcopy(module.state_dict()).items()}


def peak(recompute: Any, chunks: int) -> int:
    """The most memory that training in one stage takes, in bytes."""
    torch.cuda.reset_peak_memory_stats()
    weights(Wide, 1, recompute, chunks=chunks)
    return torch.cuda.max_memory_allocated()


class Timed(Wide):
    """Notes when each step begins, with nothing left to do on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.starts.append(time.perf_counter())


def step_time(stages: int | None, steps: int = 12) -> float:
    """Seconds of a step with one micro-batch, the median; None: of a plain Trainer."""
    module = Timed()
    strategy: Any = "auto" if stages is None else GPipeStrategy(1, checkpoint="never")
    trainer(max_steps=steps, devices=1, strategy=strategy, accelerator=OneGPU()).fit(module)
    pairs = zip(module.starts[2:], module.starts[3:], strict=False)
    return statistics.median(end - start for start, end in pairs)


def host_time(recompute: Any, micro_batches: int = 32, steps: int = 20) -> float:
    """Seconds of the host per action, where the GPU has next to nothing to do."""
    module, strategy = models.Module(), GPipeStrategy(micro_batches, checkpoint=recompute)
    module.samples = micro_batches  # type: ignore[misc]
    run = trainer(max_steps=3, devices=1, strategy=strategy, accelerator=OneGPU())
    run.fit(module)  # warm
    run = trainer(
        max_steps=steps,
        devices=1,
        strategy=GPipeStrategy(micro_batches, checkpoint=recompute),
        accelerator=OneGPU(),
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    run.fit(module)
    torch.cuda.synchronize()
    recomputed = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[recompute]
    return (time.perf_counter() - start) / (steps * (2 * micro_batches + recomputed))
