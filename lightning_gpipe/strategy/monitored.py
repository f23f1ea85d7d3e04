"""What ranks measure of a fit, and tell rank 0."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from functools import partial
from operator import add
from time import perf_counter
from types import NoneType
from typing import Any

import torch

from lightning_gpipe.comm.clock import SharedClock
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.stopwatch import ActionRecording, Stopwatch
from lightning_gpipe.monitor.figures import Figures, figures
from lightning_gpipe.monitor.hints import Facts
from lightning_gpipe.monitor.rank_report import RanBatch, RankReport, by_batch, with_batches
from lightning_gpipe.monitor.trace import Timeline
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.plan.report import outside_share
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.measured import Measured
from lightning_gpipe.schedule.placement import rounds

#: Mini-batches after which what was measured of single actions is summed up.
_HELD = 50
#: The most mini-batches that a rank tells of.
_REPORTED = 1000


class Monitored:
    """One rank's part of a pipeline that is monitored.

    Args:
        watch: Measures what this rank's stages do.
        pipeline: The module's.
        groups: The process groups.
        settings: What the user chose.
    """

    def __init__(
        self, watch: Stopwatch, pipeline: PipelinedModule, groups: Groups, settings: Settings
    ) -> None:
        self._watch, self._pipeline, self._groups = watch, pipeline, groups
        self._settings, self._recording = settings, ActionRecording(watch)
        self._clock = SharedClock(groups)
        self._message_s: float | None = None
        self.total: Figures | None = None
        self._since: float | None = None
        self._first_section, self._most_samples = 0, 0
        self._ran: list[RanBatch] = []
        self._step_began = 0  # the place of its first mini-batch
        self._own = RankReport()
        self._offset_s = 0.0
        self._of_step: list[list[Measured]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the Trainer, which is outside of the run."""
        return NoneType, ()

    def begin(self) -> None:
        """Begin a fit. Collective over all ranks."""
        self._offset_s = self._clock.offset_s()

    def skip_time(self) -> None:
        """Count what has passed since the last mini-batch for none."""
        if self._since is not None:
            self._since = perf_counter()

    def begin_batch(self) -> None:
        """Begin a mini-batch."""
        self._first_section = self._watch.section + 1
        self._recording.resume()

    def pause(self) -> None:
        """Measure nothing until the next mini-batch begins."""
        self._recording.pause()

    def end_batch(self) -> None:
        """End it."""
        self.pause()
        before, now = self._since, perf_counter()
        sections = range(self._first_section, self._watch.section + 1)
        self._since, samples = now, self._watch.samples
        self._most_samples = max(self._most_samples, samples)  # an epoch's last has fewer
        self._ran.append(RanBatch(sections, before, now, samples))

    def end_step(self, is_wanted: bool) -> None:
        """End a step, of one mini-batch or several.

        Args:
            is_wanted: Whether all that it did is kept for :meth:`timelines`.
        """
        if is_wanted or len(self._ran) >= _HELD:
            rows = self._sum_up()
            self._of_step = rows[self._step_began :] if is_wanted else []
        self._step_began = len(self._ran)

    def report(self) -> Figures | None:
        """Figures of what ran since the last time, on rank 0. Collective over all ranks."""
        self._sum_up()
        self._step_began = 0
        own, self._own = replace(self._own, peak_bytes=self._peak_bytes()), RankReport()
        if not own.batches:
            return None
        if self._message_s is None:
            own_s = self._pipeline.message_s()
            self._message_s = max(self._groups.pipeline.gather("message time", own_s))
        replicas = self._gather(own)
        self._offset_s = self._clock.offset_s()
        if not self._groups.is_first_of_all:
            return None
        found = figures(replicas, self._placement, self._message_s)
        self.total = found.joined(self.total)
        return found

    def timelines(self) -> list[Timeline]:
        """What every rank did in the last step, on rank 0. Collective over all ranks."""
        later = partial(add, self._offset_s)
        own = [[one.retimed(later) for one in row] for row in self._of_step]
        self._of_step = []
        replicas = self._gather(own)
        stages = self._groups.stages
        if not self._groups.is_first_of_all:
            return []
        return [
            Timeline(replica * stages + stage, replica, stage, batches)
            for replica, ranks in enumerate(replicas)
            for stage, batches in enumerate(ranks)
        ]

    def facts(self) -> Facts:
        """How the pipeline is made."""
        settings, module = self._settings, self._pipeline.module
        return Facts(
            self._pipeline.chunks,
            self._most_samples,
            settings.balance == "time",
            settings.virtual_stages,
            settings.step == "micro-batch",
            outside_share(module, module.get_submodule(self._pipeline.backbone)),
        )

    @property
    def _placement(self) -> tuple[int, ...]:
        return rounds(self._groups.stages, self._settings.virtual_stages)

    def _sum_up(self) -> list[list[Measured]]:
        """Sum up what was measured of single actions; returns it, by mini-batch."""
        ran, self._ran = self._ran, []
        if not ran:
            return []
        rows = by_batch(self._recording.take(), ran)
        summed = with_batches(self._own, rows, ran, self._offset_s)
        self._own = replace(summed, batches=summed.batches[-_REPORTED:])
        return rows

    def _gather(self, own: Any) -> list[list[Any]]:
        """Every rank's object, by replica and stage. Collective over all ranks."""
        of_stages = self._groups.pipeline.gather("figures", own)
        return self._groups.siblings.gather("figures", of_stages)

    def _peak_bytes(self) -> int:
        device = self._groups.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
