"""What actions took, as it was measured: plain data."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lightning_gpipe.schedule.actions import Action, Op


class Measured(NamedTuple):
    """An action as a rank ran it. Times are seconds of one clock.

    Args:
        action: The action.
        section: Counts the parts of programs that all ranks of a pipeline run together, such as the
            forwards of a mini-batch.
        start: When the rank came to it.
        begin: When what it needs was there, and its layers began.
        end: When they ended.
        done: When its result was handed on.
        beside_s: What the processor did for it beside the layers.
        is_outside: Whether it isn't the action, but code of the user's that counts as a part of it.
    """

    action: Action
    section: int
    start: float
    begin: float
    end: float
    done: float
    beside_s: float = 0.0
    is_outside: bool = False

    def retimed(self, change: Callable[[Any], float]) -> Measured:
        """The same with other times."""
        start, begin, end, done = map(change, (self.start, self.begin, self.end, self.done))
        return self._replace(start=start, begin=begin, end=end, done=done)

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank worked for it."""
        return self.end - self.begin + self.beside_s

    @property
    def wait_s(self) -> float:
        """Seconds in which it waited for messages."""
        return max(self.done - self.start - self.busy_s, 0.0)


def durations(measured: Iterable[Measured]) -> dict[tuple[int, Op], float]:
    """What each kind of action of each stage takes, in seconds, without waits.

    It is the median of all, with the user's code that belongs to each: now and then such code runs
    once more, to be looked at.
    """
    totals: dict[tuple[int, Action], float] = defaultdict(float)
    for one in measured:
        totals[one.section, one.action] += one.busy_s
    found: dict[tuple[int, Op], list[float]] = defaultdict(list)
    for (_, action), total in totals.items():
        found[action.stage, action.op].append(total)
    return {key: statistics.median(times) for key, times in found.items()}
