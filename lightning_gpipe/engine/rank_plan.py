"""What a rank does in a call of the backbone, or with a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_gpipe.schedule.actions import Action, Program, Schedule, kept_graphs
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.simulate import leads, receives


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a schedule.

    Args:
        program: Its actions.
        leads: See :func:`lightning_gpipe.schedule.simulate.leads`.
        receives: See :func:`lightning_gpipe.schedule.simulate.receives`.
        chained: See :class:`lightning_gpipe.schedule.actions.Schedule`.
    """

    program: Program
    leads: Mapping[tuple[int, int], int] = field(default_factory=dict)
    receives: Mapping[Action, Sequence[Action]] = field(default_factory=dict)
    chained: frozenset[int] = frozenset()

    @cached_property
    def forwards(self) -> Program:
        """Those of its actions that are forwards."""
        return tuple(action for action in self.program if action.op == "F")

    @cached_property
    def backwards(self) -> Program:
        """The others."""
        return tuple(action for action in self.program if action.op != "F")

    @cached_property
    def recomputes(self) -> bool:
        """Whether forwards run again."""
        return any(action.op == "R" for action in self.program)

    @cached_property
    def kept(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose forward keeps its activations."""
        return kept_graphs(self.program)

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> RankPlan:
        """A rank's part of a schedule.

        Raises:
            ValueError: If the schedule isn't valid.
        """
        validate(schedule)
        own = schedule.programs[rank]
        return cls(own, leads(schedule), receives(schedule, rank), schedule.chained)
