"""Parameters and peak memory of each stage of a language model, against one process.

The peak is that of the process's resident memory above what it was before the model was built. The
C library is told to give freed tensors back at once; else the peak is also what it keeps. The
optimizer is AdamW. Run it with

    python -m tests.benchmarks.memory                        # GPT-2 of 8 blocks, tied: 19.6 M
    python -m tests.benchmarks.memory --blocks 16 --width 512 --untied
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_gpipe import GPipeStrategy

VOCABULARY, BATCH, LENGTH, STEPS = 50257, 32, 64, 4


def memory_mb(name: str) -> float:
    """What the kernel says of this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Module(L.LightningModule):
    """GPT-2 as Hugging Face wrote it."""

    def __init__(self, blocks: int, width: int, tied: bool) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=width,
            n_layer=blocks,
            n_head=8,
            use_cache=False,
            tie_word_embeddings=tied,
        )
        self.model = GPT2LMHeadModel(config)
        self.held = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def on_train_end(self) -> None:
        self.held = sum(p.numel() for p in self.parameters() if not p.is_meta)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Peak(L.Callback):
    """Notes the peak before the model is brought back to one process."""

    def __init__(self) -> None:
        self.mb = 0.0

    def on_train_end(self, *_: Any) -> None:
        self.mb = memory_mb("VmHWM")


def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train, on every rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    base = memory_mb("VmRSS")
    torch.manual_seed(1)
    module, peak = Module(arguments.blocks, arguments.width, not arguments.untied), Peak()
    tokens = torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH))
    stages = 1 if arguments.step == "none" else arguments.stages
    strategy: Any = "auto"
    if arguments.step != "none":
        strategy = GPipeStrategy(arguments.chunks, step=arguments.step)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_epochs=1,
        callbacks=[peak],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=BATCH))
    own = {"parameters": module.held, "mb": round(peak.mb - base)}
    found: list[Any] = [own] * stages
    if stages > 1:
        torch.distributed.all_gather_object(found, own)
    return found


def main() -> None:
    """Measure one process and both step modes, each in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--step", choices=["none", "mini-batch", "micro-batch"])
    arguments = parser.parse_args()
    if arguments.step is not None:
        found = measure(arguments)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(json.dumps(found))
        return
    one = 0.0
    for step in ("none", "mini-batch", "micro-batch"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.memory", *sys.argv[1:], "--step", step],
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
            check=True,
        )
        line = next(line for line in done.stdout.splitlines() if line.startswith("["))
        rows = json.loads(line)
        one = one or rows[0]["mb"]
        name = "one process" if step == "none" else f"step={step!r}"
        for stage, row in enumerate(rows):
            print(
                f"{name}, stage {stage}: {row['parameters'] / 1e6:.1f} M parameters,"
                f" peak {row['mb']} MB, {row['mb'] / one:.2f} of one process"
            )


if __name__ == "__main__":
    main()
