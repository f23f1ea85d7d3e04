"""What actions take, as far as it is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpipe.schedule.actions import Op

#: Time of a backward, in forwards: one for the input's gradient, one for the weights'.
BACKWARD_RATIO = 2.0


@dataclass(frozen=True)
class Costs:
    """The time that one micro-batch takes in each stage, in any unit.

    Args:
        forward: Of F.
        recompute: Of R.
        backward: Of B.
        input_gradient: Of I.
        weight_gradient: Of W.
        message: From the end of an action until its result is on another rank.
    """

    forward: tuple[float, ...]
    recompute: tuple[float, ...]
    backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    message: float = 0.0

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float] | None = None,
        recompute: Sequence[float] | None = None,
        message: float = 0.0,
    ) -> Costs:
        """What is known without a measurement.

        Args:
            forward: Time of each stage's forward.
            backward: Time of each whole backward, half of which is the input's gradient; ``None``:
                :data:`BACKWARD_RATIO` times the forward.
            recompute: Time of each recompute; ``None``: as long as the forward.
            message: See the class.
        """
        whole = [BACKWARD_RATIO * time for time in forward] if backward is None else backward
        half = tuple(time / 2 for time in whole)
        again = forward if recompute is None else recompute
        return cls(tuple(forward), tuple(again), tuple(whole), half, half, message)

    @classmethod
    def measured(
        cls, times: Mapping[tuple[int, Op], float], stages: int, message: float = 0.0
    ) -> Costs:
        """What was measured; what wasn't follows of the rest.

        A whole backward does what its halves do, so where it took longer, the processor was busy
        with something else. Taken for true, that would have backwards split, which holds more.

        Args:
            times: For stages and kinds of actions the time.
            stages: The number of stages.
            message: See the class.
        """
        forward = [times.get((s, "F"), 0.0) for s in range(stages)]
        columns: dict[str, list[float]] = {op: [] for op in "RBIW"}
        for s, f in enumerate(forward):
            half, rest = times.get((s, "I")), times.get((s, "W"))
            whole = times.get((s, "B"))
            if half is not None and rest is not None:  # what is one doesn't take longer
                whole = min(half + rest, math.inf if whole is None else whole)
            elif whole is None:
                whole = BACKWARD_RATIO * f
            columns["R"].append(times.get((s, "R"), f))
            columns["B"].append(whole)
            columns["I"].append(whole / 2 if half is None else half)
            columns["W"].append(whole / 2 if rest is None else rest)
        made = {op: tuple(column) for op, column in columns.items()}
        return cls(tuple(forward), made["R"], made["B"], made["I"], made["W"], message)

    def rounded(self, parts: int) -> Costs:
        """The costs as multiples of a part of the middle one, at least one.

        Args:
            parts: Into how many parts that is divided.
        """
        known = sorted(time for op in "FRIW" for time in self.times[op])
        unit = known[len(known) // 2] / parts
        if not unit:
            return self

        def nearest(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(max(round(time / unit), 1) * unit for time in times)

        return Costs(
            nearest(self.forward),
            nearest(self.recompute),
            nearest(self.backward),
            nearest(self.input_gradient),
            nearest(self.weight_gradient),
            self.message,
        )

    @property
    def are_multiples(self) -> bool:
        """Whether everything takes a multiple of what is shortest, and messages take nothing."""
        unit = min(map(min, self.times.values()))
        return not self.message and all(
            unit and time % unit == 0 for times in self.times.values() for time in times
        )

    @cached_property
    def times(self) -> dict[str, tuple[float, ...]]:
        """For every kind of action its time in each stage."""
        return {
            "F": self.forward,
            "R": self.recompute,
            "B": self.backward,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }
