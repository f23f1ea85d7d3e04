"""What is trained on GPUs: several stages may share one."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_gpipe import GPipeStrategy, PipelineMonitor
from tests import models
from tests.gpu.one_gpu import OneGPU
from tests.training import trainer

EVERY = 5  # steps that are timed together: a host may run ahead of its GPU
RECOMPUTE = ("always", "except_last", "never")


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
    """Train on this rank; returns the weights that it has, in host memory.

    Args:
        kind: The module.
        stages: K, all on the first GPU; None: a plain Trainer.
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
    run = trainer(max_steps=4, devices=stages or 1, strategy=strategy, accelerator=OneGPU())
    torch.set_default_device(default_device)
    try:
        run.fit(module)
    finally:
        torch.set_default_device(None)
    values = copy.deepcopy(module.state_dict())
    return {name: value.cpu() for name, value in values.items() if not value.is_meta}


def peak(recompute: Any, chunks: int) -> int:
    """The most memory that training in one stage takes, in bytes."""
    torch.cuda.reset_peak_memory_stats()
    weights(Wide, 1, recompute, chunks=chunks)
    return torch.cuda.max_memory_allocated()


class Timed(Wide):
    """Notes when steps begin, with nothing left to do on the GPU: the third, and each fifth."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step % EVERY == 2:
            torch.cuda.synchronize()
            self.starts.append(time.perf_counter())


def step_time(stages: int | None, steps: int = 43) -> float:
    """Seconds of a step with one micro-batch, the median; None: of a plain Trainer."""
    module = Timed()
    strategy: Any = "auto" if stages is None else GPipeStrategy(1, checkpoint="never")
    trainer(max_steps=steps, devices=1, strategy=strategy, accelerator=OneGPU()).fit(module)
    return _median_step(module)


def host_time(recompute: Any, few: int = 8, many: int = 40) -> float:
    """Seconds of the host per action, where the GPU has next to nothing to do.

    From two numbers of micro-batches, so that what a step takes besides doesn't count.
    """

    class Empty(Timed):
        samples = many

        def build(self) -> None:
            self.backbone = nn.Sequential(*(nn.Identity() for _ in range(3)), nn.Dropout(0.0))
            self.scale = nn.Parameter(torch.ones(()))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.backbone(x * self.scale), y)

    def seconds(chunks: int) -> float:
        module, strategy = Empty(), GPipeStrategy(chunks, checkpoint=recompute)
        trainer(max_steps=28, devices=1, strategy=strategy, accelerator=OneGPU()).fit(module)
        return _median_step(module)

    recomputed = {"always": 1, "except_last": 1, "never": 0}[recompute]
    return (seconds(many) - seconds(few)) / ((many - few) * (2 + recomputed))


def _median_step(module: Timed) -> float:
    pairs = zip(module.starts, module.starts[1:], strict=False)
    return statistics.median(end - start for start, end in pairs) / EVERY


class _Synchronizations(L.Callback):
    """Counts where the host waits for the GPU in the fourth step, where no check is due."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._caught = warnings.catch_warnings(record=True)
        self._found: Any = None

    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == 3:
            self._found = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 3:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.places.update(
                f"{Path(one.filename).name}:{one.lineno}"
                for one in self._found
                if "called a synchronizing" in str(one.message)
            )


def synchronizations(
    kind: type[L.LightningModule], chunks: int, recompute: Any, step: Any = "mini-batch"
) -> dict[str, int]:
    """Where the host waits for the GPU in a step of one stage, and how often."""
    counter = _Synchronizations()
    strategy = GPipeStrategy(chunks, checkpoint=recompute, step=step)
    run = trainer(max_steps=4, devices=1, strategy=strategy, accelerator=OneGPU())
    run.callbacks.append(counter)
    run.fit(kind())
    return dict(counter.places)


class OnMeta(models.Shared):
    """Built without values, which stages draw for themselves; weights are shared between stages."""

    def build(self) -> None:
        with torch.device("meta"):
            super().build()


class Beside(models.Around):
    """A table in host memory goes through all layers beside what is computed on the GPU."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(models.WIDTH, models.WIDTH)

        def forward(self, value: Any) -> Any:
            h, table = value
            return self.linear(h).tanh() * table.to(h.device), table

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(self.Layer() for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        table = torch.linspace(1, 2, models.WIDTH, dtype=x.dtype, device="cpu")
        h, table = self.backbone((self.before(x), table))
        return nn.functional.mse_loss(self.after(h) * float(table.sum()), y)


class Waiting(models.Around):
    """A layer of it looks at its values, for which the host waits."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > -1e9 else -x

    def build(self) -> None:
        super().build()
        self.backbone.append(self.Layer())


class Compiled(models.Around):
    """Its layers are compiled, with dropout and batch norm."""

    def build(self) -> None:
        super().build()
        width = models.WIDTH
        parts = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2)]
        blocks = [nn.Sequential(*copy.deepcopy(parts)) for _ in range(4)]
        self.backbone = nn.Sequential(*(torch.compile(block) for block in blocks))


class Spinning(models.Around):
    """Layers that keep the GPU busy, not the host: the second half of them three times as long."""

    class Layer(nn.Module):
        def __init__(self, cycles: int) -> None:
            super().__init__()
            self.cycles = cycles

        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(self.cycles)
            return x * 1.0

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(self.Layer(c * 10**6) for c in (2, 2, 6, 6)))


class _Last(DummyLogger):
    """Keeps what was logged last."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.metrics.update(args[0] if args else kwargs["metrics"])


def monitored() -> dict[str, float]:
    """What the monitor measures in one stage of two layers, and of all four."""
    logged: dict[str, float] = {}
    for stages in (slice(0, 2), slice(0, 4)):
        module = Spinning()
        module.backbone = module.backbone[stages]
        monitor = PipelineMonitor(every_n_steps=2, table=False)
        strategy = GPipeStrategy(4, checkpoint="never")
        logger = _Last()
        options = {"strategy": strategy, "logger": logger, "callbacks": [monitor]}
        trainer(max_steps=6, devices=1, accelerator=OneGPU(), **options).fit(module)
        logged[f"{stages.stop} layers"] = logger.metrics["pipeline/stage_0/busy_s"]
        logged["peak"] = logger.metrics["pipeline/stage_0/peak_memory_bytes"]
    return logged
