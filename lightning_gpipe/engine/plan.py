"""What a rank does in a call of the backbone, or with a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpipe.schedule.actions import Program, Schedule
from lightning_gpipe.schedule.check import validate
from lightning_gpipe.schedule.simulate import leads


@dataclass(frozen=True, slots=True)
class Plan:
    """A rank's part of a schedule.

    Args:
        program: Its actions.
        forwards: Those of them that are forwards.
        backwards: The others.
        leads: See :func:`lightning_gpipe.schedule.simulate.leads`.
    """

    program: Program
    forwards: Program
    backwards: Program
    leads: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> Plan:
        """A rank's part of a schedule.

        Raises:
            ValueError: If the schedule isn't valid.
        """
        validate(schedule)
        program = schedule.programs[rank]
        forwards = tuple(action for action in program if action.op == "F")
        backwards = tuple(action for action in program if action.op != "F")
        return cls(program, forwards, backwards, leads(schedule))
