"""What a rank does with a mini-batch whose step runs once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

from torch import nn

from lightning_gpipe.engine.rank import Rank
from lightning_gpipe.engine.rank_plan import RankPlan
from lightning_gpipe.schedule.actions import Schedule

#: Makes a schedule for M micro-batches, with backwards or without, some of them new.
MakeSchedule: TypeAlias = Callable[[int, bool, frozenset[int]], Schedule]


class StepPlans:
    """The plans of a rank.

    Args:
        rank: The stages of the rank.
        make: Makes the schedule.
        modules: All parts of the user's module.
    """

    def __init__(self, rank: Rank, make: MakeSchedule, modules: Sequence[nn.Module]) -> None:
        self._rank, self._make = rank, make
        self._synchronized = [m for m in modules if isinstance(m, nn.SyncBatchNorm)]
        self._made: dict[tuple[int, bool, frozenset[int]], RankPlan] = {}

    def clear(self) -> None:
        """Make schedules anew from now on."""
        self._made.clear()

    def of(self, looks: Sequence[str], known: Container[str], trains: bool) -> RankPlan:
        """The plan for a mini-batch; collective over the replicas where SyncBatchNorm trains.

        Args:
            looks: What each micro-batch looks like.
            known: The looks of which it is known what comes out of the backbone.
            trains: Whether there are backwards.
        """
        key = len(looks), trains, self._new(looks, known)
        if key not in self._made:
            self._made[key] = RankPlan.of(self._make(*key), self._rank.groups.stage)
        return self._made[key]

    def _new(self, looks: Sequence[str], known: Container[str]) -> frozenset[int]:
        """The first micro-batch of each look that isn't known.

        Where a rank has several stages, they run in another order then. SyncBatchNorm lets replicas
        wait for each other, so all of them take that order where one of them has to.
        """
        new = {looks.index(look) for look in looks if look not in known}
        groups = self._rank.groups
        may_wait = len(self._rank.stages) > 1 and groups.replicas > 1
        if may_wait and any(layer.training for layer in self._synchronized):
            new = {m for found in groups.siblings.gather("new shapes", [*new]) for m in found}
        return frozenset(m for m in new if m < len(looks))
