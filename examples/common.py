"""What the examples share: the options of a pipeline, and what a run has cost."""

import argparse
import resource
import time

import lightning as L
import torch


def add_options(parser: argparse.ArgumentParser, chunks: int, epochs: int) -> None:
    """Add how a pipeline is cut, and for how long it is trained."""
    parser.add_argument(
        "--stages",
        type=int,
        default=torch.cuda.device_count() or 2,
        help="stages of the pipeline, one process each",
    )
    parser.add_argument(
        "--chunks", type=int, default=chunks, help="micro-batches that a mini-batch is split into"
    )
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training data")


def one_cycle(module: L.LightningModule, learning_rate: float) -> dict:
    """AdamW, with a learning rate that rises and falls once in the run."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    steps = module.trainer.estimated_stepping_batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Cost(L.Callback):
    """What training takes: the time, and the peak memory of each process."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.start
        self.peaks = [peak_megabytes(pl_module.device)] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(self.peaks, self.peaks[0])

    def __str__(self) -> str:
        peaks = ", ".join(f"{peak:.0f}" for peak in self.peaks)
        return (
            f"Time:                {self.seconds:.0f} s\n"
            f"Peak memory:         {peaks} MB, of each stage's process\n"
            f"Threads:             {torch.get_num_threads()} in each"
        )


def peak_megabytes(device: torch.device) -> float:
    """The most memory that this process has held: of the GPU, or all of it where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts KiB
