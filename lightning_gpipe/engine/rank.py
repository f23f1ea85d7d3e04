"""The stages of one rank, what they are linked to, and what runs them: for every step mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.executor import Executor
from lightning_gpipe.engine.links import RankLinks
from lightning_gpipe.engine.stage import Stage
from lightning_gpipe.engine.stopwatch import Stopwatch
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.schedule.placement import rounds


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank runs.

    Args:
        groups: The process groups.
        placement: For each stage its rank in the pipeline.
        links: What the stages of this rank are linked to.
        executor: Runs their actions.
        trial: Whether all stages go on when one fails.
    """

    groups: Groups
    placement: tuple[int, ...]
    links: RankLinks
    executor: Executor
    trial: Trial

    @classmethod
    def of(
        cls, stages: Mapping[int, Stage], groups: Groups, trial: Trial, watch: Stopwatch
    ) -> Rank:
        """A rank that runs stages.

        Args:
            stages: The layers of this rank, by virtual stage.
            groups: The process groups.
            trial: Whether all stages go on when one fails.
            watch: Measures what the stages do.
        """
        placement = rounds(groups.stages, len(stages))
        links = RankLinks(placement, groups)
        in_order = not groups.pipeline.through_host
        executor = Executor(stages, links.of_stages, watch, trial, in_order)
        return cls(groups, placement, links, executor, trial)

    @property
    def stages(self) -> list[int]:
        """The stages of this rank, in order."""
        return [stage for stage, rank in enumerate(self.placement) if rank == self.groups.stage]

    @property
    def last(self) -> int:
        """The last stage of the pipeline."""
        return len(self.placement) - 1
