"""Chooses the schedule of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median_low
from typing import Literal

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.actions import Schedule
from lightning_gpipe.schedule.checkpoint import recomputed
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.gpipe import (
    chained,
    fill_drain,
    forward_only,
    in_turn,
    without_backwards,
)
from lightning_gpipe.schedule.one_f_one_b import one_f_one_b
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.search import held, search

_HELD = 1  # micro-batches whose activations a stage may hold, if all are recomputed, as in 1F1B
#: What a stage may hold of those that are kept, times K: 1F1B holds K, and where no rank is to be
#: idle between mini-batches, 2 K - 1 are needed (zero bubble, Qi et al. 2023, ZB-2p).
HELD_OF_KEPT = 2.0


@dataclass(slots=True)
class Schedules:
    """Makes schedules.

    Args:
        settings: What the user chose.
        placement: For each stage its rank.
        replicas: D. With several a stage's last backward is whole, for the reducer to see it.
        costs: What the actions take, as far as it is known.
        whole: Stages whose backward can't be split.
        splits: Which backwards are split: while they are measured none or all, else those where it
            helps.
    """

    settings: Settings
    placement: tuple[int, ...]
    replicas: int
    costs: Costs
    whole: frozenset[int] = frozenset()
    splits: Literal["none", "all", "some"] = "some"

    @classmethod
    def unmeasured(cls, settings: Settings, partition: Partition, replicas: int) -> Schedules:
        """What makes schedules before anything is measured, by the shares of a cut.

        Shares tell roughly what stages take: they are whole multiples of the middle one here, so
        that of many cuts that are tried the same schedule isn't searched for each.

        Args:
            settings: What the user chose.
            partition: The cut.
            replicas: D.
        """
        middle = median_low(partition.part_shares) or 1.0
        costs = Costs.of([max(1.0, round(share / middle)) for share in partition.part_shares])
        return cls(settings, rounds(partition.count, partition.virtual_stages), replicas, costs)

    @property
    def depends_on_costs(self) -> bool:
        """Whether the schedule is searched for."""
        return self.settings.step == "micro-batch" and self.settings.schedule in (
            "auto",
            "searched",
        )

    def make(
        self, micro_batches: int, trains: bool = True, new: frozenset[int] = frozenset()
    ) -> Schedule:
        """The schedule for M micro-batches.

        Args:
            micro_batches: M.
            trains: Whether there are backwards.
            new: Micro-batches of which it isn't known what comes out of the backbone.
        """
        checkpoint = self.settings.recomputing
        if self.settings.step == "mini-batch":
            return fill_drain(self.placement, micro_batches, checkpoint)
        if max(self.placement) == 0:
            alone = in_turn(self.placement, micro_batches, checkpoint)
            return alone if trains else without_backwards(alone)
        has_several = len(self.placement) > max(self.placement) + 1  # stages on a rank
        if trains and has_several and max(new, default=0) > 0:
            # forwards come first, and none is followed at once by a backward that reuses it
            schedule = fill_drain(self.placement, micro_batches, checkpoint, ascending=True)
        else:
            schedule = self._of_several(micro_batches, trains)
        return chained(schedule, new)

    def _of_several(self, micro_batches: int, trains: bool) -> Schedule:
        """The schedule of several ranks, with ``step="micro-batch"``."""
        if not trains:
            return forward_only(self.placement, micro_batches)
        checkpoint = self.settings.recomputing
        match self.settings.schedule:
            case "fill_drain":
                return fill_drain(self.placement, micro_batches, checkpoint, ascending=True)
            case "1f1b" | "interleaved":
                return one_f_one_b(self.placement, micro_batches, checkpoint)
        limit = self._limit(micro_batches)
        if self.splits == "all":  # what is planned has room for this much
            limit = min(limit, held(replace(self, splits="some").make(micro_batches)))
        return search(
            self.placement,
            micro_batches,
            checkpoint,
            self.costs,
            limit,
            frozenset(range(len(self.placement))) if self.splits == "none" else self.whole,
            joins_last=self.replicas > 1,
            splits_all=self.splits == "all",
        )

    def _limit(self, micro_batches: int) -> float:
        """The largest number of micro-batches whose activations a stage holds."""
        kept = micro_batches - recomputed(self.settings.recomputing, micro_batches)
        stages = max(self.placement) + 1
        return max(_HELD, min(kept, HELD_OF_KEPT * stages))
