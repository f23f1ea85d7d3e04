"""Trains a model that no process may hold, and shows what each held.

The model's weights alone are larger than what a process may allocate beside what it needs for a
tiny model; with gradients and momentum it is more than three times that. Four processes build and
train it, save their parts, and are killed in the next epoch; two pipelines of two stages go on from
the folder; ``lightning-gpipe consolidate`` makes one file of theirs, and a plain Trainer goes on
from that. The weights are compared with those of a plain Trainer that ran without a break.

    python -m tests.benchmarks.giant                 # 1 GiB of weights, on 12 GiB
    python -m tests.benchmarks.giant --width 256     # quick, too small to show memory
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.benchmarks.report import Table, surroundings

LAYERS, BATCH, BATCHES, MB = 32, 8, 2, 1 << 20
POINTS = ("built", "trained", "saved", "after the run")


def kernel_mb(name: str) -> float:
    """What the kernel says of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{name}:")[1].split()[0]) / 1024


class Sampler(threading.Thread):
    """Follows what this process may write to: the kernel keeps no peak of it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun = self.peak = kernel_mb("VmData")

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, kernel_mb("VmData"))
            time.sleep(0.01)


class Giant(L.LightningModule):
    """Linear layers, in double precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            layers = [nn.Linear(self.width, self.width) for _ in range(LAYERS)]
            self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()  # type: ignore[misc,no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        shape = 2, BATCH * BATCHES, self.width
        x, y = torch.randn(shape, generator=generator, dtype=torch.float64)
        data, strategy = TensorDataset(x, y), self.trainer.strategy
        if not isinstance(strategy, GPipeStrategy):
            return DataLoader(data, batch_size=BATCH)
        # every replica has its share of each batch
        sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(data, batch_size=BATCH // strategy.replicas, sampler=sampler)


class Watch(L.Callback):
    """Notes memory, and ends the process without a word where it is told to."""

    def __init__(self, killed_in: int | None) -> None:
        self.killed_in = killed_in
        self.rss: dict[str, float] = {}

    def note(self, point: str) -> None:
        self.rss[point] = kernel_mb("VmHWM")

    def on_train_start(self, *_: Any) -> None:
        self.note("built")

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        self.note("trained")
        if run.current_epoch == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_start(self, run: L.Trainer, *_: Any) -> None:
        if run.current_epoch:
            self.note("saved")


def run(options: argparse.Namespace) -> None:
    """One phase, in one process of it."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    sampler = Sampler()
    sampler.start()
    if options.data_mb:
        most = int((sampler.begun + options.data_mb) * MB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    watch, module = Watch(options.killed_in), Giant(options.width)
    strategy: Any = "auto"
    if options.stages:
        strategy = GPipeStrategy(
            4,
            stages=options.stages,
            balance="params",
            save_distributed_checkpoint=True,
            gradient_as_bucket_view=True,  # else replicas hold gradients twice
        )
    saves = ModelCheckpoint(options.out, "{epoch}", save_top_k=-1) if options.stages else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=options.epochs,
        callbacks=[watch, *([saves] if saves else [])],
        enable_checkpointing=bool(saves),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=options.ckpt)
    watch.note("after the run")
    if not options.stages:
        trainer.save_checkpoint(Path(options.out) / "plain.ckpt")
    told = {"rss": watch.rss, "data": sampler.peak - sampler.begun}
    (Path(options.out) / f"{options.phase}-{trainer.global_rank}.json").write_text(json.dumps(told))


def start(out: Path, phase: str, **options: Any) -> list[dict[str, Any]]:
    """Run a phase; returns what each process says."""
    out.mkdir(exist_ok=True)
    named = {"phase": phase, "out": out, **options}
    listed = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value]
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.benchmarks.giant", *listed]
    environment = {**os.environ, **exact, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and "killed_in" not in options:
        raise RuntimeError(f"{phase}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = sorted(out.glob(f"{phase}-*.json"))
    return [json.loads(path.read_text()) for path in found]


def show(
    title: str, held: dict[str, float], tiny: list[dict[str, Any]], told: list[dict[str, Any]]
) -> None:
    """Print the peaks, without those of a tiny model, beside what each rank should hold by then."""
    table = Table(title, [text for point in held for text in (f"peak, {point}", "of its share")])
    for rank, (base, own) in enumerate(zip(tiny, told, strict=True)):
        peaks = {point: own["rss"][point] - base["rss"][point] for point in held}
        cells = [cell for point, mb in peaks.items() for cell in (mb, mb / held[point])]
        table.rows.append((f"rank {rank}", cells))
    print(table, flush=True)


def main() -> None:
    """Run all phases, or one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=2048, help="of 32 layers; default: %(default)s"
    )
    for name in ("phase", "out", "ckpt"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("stages", "devices", "epochs", "killed-in"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data-mb", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        run(options)
        return
    for name, value in surroundings("python -m tests.benchmarks.giant").items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.width)


def compare(folder: Path, width: int) -> None:
    """All phases: within their limits, and with the weights of a run without a break."""
    weights = LAYERS * (width * width + width) * 8 / MB
    four, pairs = {"stages": 4, "devices": 4, "epochs": 2}, {"stages": 2, "devices": 4, "epochs": 3}
    tiny = start(folder / "tiny", "four", width=8, **four)
    first = folder / "tiny/epoch=0.ckpt"
    tiny_pairs = start(folder / "tiny", "pairs", width=8, ckpt=first, **pairs)
    limit = 1.1 * 3 * weights / 4
    print(
        f"weights {weights:.0f} MB, with gradients and momentum {3 * weights:.0f} MB; a process may"
        f" allocate {limit:.0f} MB beside what it does for a tiny model"
        f" ({weights / limit:.2f} and {3 * weights / limit:.2f} times that)"
    )
    data = max(one["data"] for one in tiny) + 64 + limit
    start(folder / "giant", "four", width=width, data_mb=data, killed_in=1, **four)
    whole = start(folder / "whole", "four", width=width, data_mb=data, **four)
    held = dict.fromkeys(POINTS, 3 * weights / 4) | {"built": weights / 4}
    show("MB, four stages", held, tiny, whole)
    # the first step of replicas holds gradients twice, in their buckets
    data = max(one["data"] for one in tiny_pairs) + 64 + 2 * limit + weights / 2
    saved = folder / "giant/epoch=0.ckpt"
    found = start(folder / "giant", "pairs", width=width, data_mb=data, ckpt=saved, **pairs)
    held = dict.fromkeys(POINTS, 2 * weights) | {"built": weights}
    show("MB, two pipelines of two stages, from the folder", held, tiny_pairs, found)
    file = folder / "giant/whole.ckpt"
    consolidate = [sys.executable, "-m", "lightning_gpipe", "consolidate"]
    subprocess.run([*consolidate, str(folder / "giant/epoch=2.ckpt"), str(file)], check=True)
    start(folder / "giant", "plain", width=width, devices=1, epochs=4, ckpt=file)
    start(folder / "plain", "plain", width=width, devices=1, epochs=4)
    found, expected = (
        torch.load(folder / name / "plain.ckpt", mmap=True)["state_dict"]
        for name in ("giant", "plain")
    )
    furthest = max((found[name] - expected[name]).abs().max().item() for name in expected)
    print(f"weights of both runs differ by at most {furthest:.1e}")
    if not (found.keys() == expected.keys() and furthest < 1e-10):
        sys.exit(1)


if __name__ == "__main__":
    main()
