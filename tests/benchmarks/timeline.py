"""Draws the timeline of a real run for the documentation: four stages that train.

Layers sleep, as long for each gradient as forward, so that four stages run in parallel on few
cores:

    OMP_NUM_THREADS=1 python -m tests.benchmarks.timeline docs/_static/timeline.png
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import lightning as L
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy, PipelineMonitor
from tests.benchmarks.contestants.lightning import Module, Same
from tests.benchmarks.workloads import emulated

STAGES, CHUNKS, STEPS = 4, 8, 8


def main(out: Path) -> None:
    """Train, and keep the picture of the last step."""
    workload = emulated(STAGES, 0.01)
    with tempfile.TemporaryDirectory() as folder:
        monitor = PipelineMonitor(timeline=[STEPS - 1], folder=folder)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=STAGES,
            strategy=GPipeStrategy(CHUNKS, start_method="fork"),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[monitor],
        )
        data = DataLoader(Same(lambda: workload.batch(CHUNKS)), batch_size=None)
        trainer.fit(Module(workload), data)
        shutil.copy(Path(folder, f"pipeline-step={STEPS - 1}.png"), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the picture to write")
    main(parser.parse_args().out)
