"""A callback that shows where the time of a pipeline goes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_gpipe.engine.stopwatch import Stopwatch
from lightning_gpipe.monitor import picture, table, trace
from lightning_gpipe.monitor.figures import Figures
from lightning_gpipe.monitor.hints import hints
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.plan.settings import Settings, check_flag, is_count
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.loggers import log_picture
from lightning_gpipe.strategy.monitored import Monitored
from lightning_gpipe.strategy.places import PlacedStrategy
from lightning_gpipe.strategy.world import World


class PipelineMonitor(Callback):
    """Shows where the bubble of a pipeline is, which stage is slow, what memory each takes.

    It measures every action of the training steps on every rank, and logs every few steps, with
    the middle mini-batch's numbers where there are several:

    - ``pipeline/bubble``: share of the time that stages don't work in while the pipeline runs,
      0 to 1, and ``pipeline/expected_bubble``: the same by the schedule's simulation, with what
      actions were measured to take.
    - ``pipeline/imbalance``: by which share of the stages' mean the slowest one has more work.
    - ``pipeline/batch_s``: seconds from one mini-batch to the next; ``pipeline/samples_per_s``: of
      all replicas.
    - ``pipeline/stage_0/busy_s`` and so on: seconds of a stage's work on a mini-batch, its
      messages' included; ``pipeline/stage_0/wait_s``: those for which its actions waited for
      messages; ``pipeline/stage_0/peak_memory_bytes``: the most that it has held so far, on a GPU
      in tensors, on a CPU as a process.

    Stages are those of the strategy, and the mean of all replicas. At the end of a fit a table is
    printed, with hints where something is off. Validation isn't measured.

    Args:
        every_n_steps: How often it logs; ``None``: as the Trainer's ``log_every_n_steps`` says.
            Of what ran in between it looks at the last 1,000 mini-batches.
        timeline: The steps, as loggers count them from 0, whose timeline is written: a Chrome trace
            of all ranks, for https://ui.perfetto.dev, and a picture.
        picture: Whether a timeline is drawn as PNG, too, which needs matplotlib, and shown by
            TensorBoard and W&B.
        folder: Where timelines go, on a disk or a file system that fsspec knows; ``None``: to the
            first logger's folder, or the Trainer's ``default_root_dir``.
        table: Whether the table is printed.

    Raises:
        ModuleNotFoundError: If there is a picture to draw, and no matplotlib.
        ValueError: If an argument has a wrong value; at a run's setup, if the Trainer's strategy
            isn't GPipeStrategy.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        timeline: Sequence[int] = (),
        picture: bool = True,
        folder: str | Path | None = None,
        table: bool = True,
    ) -> None:
        if every_n_steps is not None and not is_count(every_n_steps):
            raise ValueError(
                f"every_n_steps must be None or a whole number from 1, got {every_n_steps!r}."
            )
        steps = _steps(timeline)
        for name, flag in (("picture", picture), ("table", table)):
            check_flag(name, flag)
        if not (folder is None or isinstance(folder, (str, os.PathLike))):
            raise ValueError(f"folder must be None or a path, got folder={folder!r}.")
        if steps and picture:
            _require_matplotlib()
        self._every, self._timeline, self._folder = every_n_steps, steps, folder
        self._draws, self._prints = picture, table
        self._monitored: Monitored | None = None
        self._steps_before = 0
        #: The figures that were logged last, and those of the whole fit when it has ended, in the
        #: process of rank 0.
        self.figures: Figures | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PlacedStrategy):
            raise ValueError(
                "PipelineMonitor shows the pipeline of GPipeStrategy, and this Trainer's strategy"
                f" is {type(trainer.strategy).__name__}: give Trainer(strategy=GPipeStrategy(...)),"
                " or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.figures, self._steps_before = None, trainer.global_step
        self._here.begin()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._here.skip_time()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._here.pause()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._here.skip_time()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._here.begin_batch()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        here, step = self._here, _lightning.logged_step(trainer)
        here.end_batch()
        if trainer.global_step == self._steps_before:
            return  # gradients accumulate
        self._steps_before = trainer.global_step
        is_drawn = step in self._timeline
        here.end_step(is_drawn)
        if is_drawn:
            self._write_timeline(trainer, step)
        every = self._every or vars(trainer)["log_every_n_steps"]  # it doesn't declare them
        is_logged = every > 0 and (step + 1) % every == 0
        if is_logged:
            self.figures = here.report()
            metrics = self.figures.metrics() if self.figures is not None else {}
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=step)
        if is_drawn or is_logged:
            here.skip_time()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        here = self._here
        here.end_step(False)
        here.report()
        self.figures = here.total
        if self.figures is not None and self._prints:
            table.show(self.figures, hints(self.figures, here.facts()))

    @property
    def _here(self) -> Monitored:
        if self._monitored is None:
            raise RuntimeError("PipelineMonitor works in a Trainer's fit with GPipeStrategy.")
        return self._monitored

    def _write_timeline(self, trainer: pl.Trainer, step: int) -> None:
        """Write a step's timeline on rank 0. Collective over all ranks."""
        timelines = self._here.timelines()
        folder = self._folder or trainer.log_dir or trainer.default_root_dir  # collective
        if not timelines:
            return
        name = os.path.join(folder, f"pipeline-step={step}")
        trace.write(timelines, f"{name}.json")
        rank_zero_info(f"The timeline of step {step}: {name}.json")
        if self._draws:
            title = f"Step {step} on {len(timelines)} rank{'s' * (len(timelines) > 1)}"
            pixels = picture.draw(timelines, title, f"{name}.png")
            log_picture(trainer.loggers, "pipeline/timeline", pixels, step)


_require_matplotlib = picture.require


def _steps(timeline: Any) -> frozenset[int]:
    is_list = isinstance(timeline, Iterable) and not isinstance(timeline, (str, bytes))
    listed: tuple[Any, ...] = tuple(timeline) if is_list else (None,)
    if not all(is_count(step) or (step == 0 and step is not False) for step in listed):
        raise ValueError(f"timeline must be a list of steps from 0, got timeline={timeline!r}.")
    return frozenset(map(int, listed))


@contextmanager
def attached(
    trainer: pl.Trainer,
    watch: Stopwatch,
    pipeline: PipelinedModule,
    world: World,
    settings: Settings,
) -> Iterator[None]:
    """Let the Trainer's monitors see a pipeline, until the end of the run.

    Args:
        trainer: The Trainer.
        watch: Measures what this rank's stages do.
        pipeline: The module's.
        world: The processes.
        settings: What the user chose.
    """
    callbacks: list[Any] = vars(trainer)["callbacks"]  # it doesn't declare them
    monitors = [callback for callback in callbacks if isinstance(callback, PipelineMonitor)]
    for monitor in monitors:
        monitor._monitored = Monitored(watch, pipeline, world.groups, settings)
    try:
        yield
    finally:
        for monitor in monitors:
            if monitor._monitored is not None:
                monitor._monitored.pause()
            monitor._monitored = None
