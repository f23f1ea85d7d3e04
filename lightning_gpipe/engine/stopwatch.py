"""How long the actions of a rank take, without what they wait for."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

from lightning_gpipe.schedule.actions import Op

#: A moment: seconds, or an event on the device's stream.
_Mark: TypeAlias = Any
_Spans: TypeAlias = dict[tuple[int, Op], list[tuple[_Mark, _Mark]]]


class Stopwatch:
    """Measures actions while it is on.

    Args:
        device: Where they run. On a GPU it is the time there that counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._since: _Mark = None
        self._actions: _Spans = defaultdict(list)
        self._outside: _Spans = defaultdict(list)
        self._beside: dict[tuple[int, Op], list[float]] = defaultdict(list)
        self._worked = 0.0
        self.is_on = False

    def around(self, stage: int, op: Op) -> AbstractContextManager[None]:
        """Run all that belongs to an action inside this context, such as its messages.

        What the processor does beside the layers' work counts as a part of the action. A GPU
        doesn't wait for it.
        """
        return self._around(stage, op) if self.is_on and not self._on_cuda else nullcontext()

    @contextmanager
    def _around(self, stage: int, op: Op) -> Iterator[None]:
        begin, self._worked = time.thread_time(), 0.0
        yield
        self._beside[stage, op].append(time.thread_time() - begin - self._worked)

    def action(self, stage: int, op: Op) -> AbstractContextManager[None]:
        """Run an action inside this context."""
        return self._action(stage, op) if self.is_on else nullcontext()

    @contextmanager
    def _action(self, stage: int, op: Op) -> Iterator[None]:
        begin, worked = self._now(), time.thread_time()
        yield
        self._worked += time.thread_time() - worked
        if self.is_on:
            self._actions[stage, op].append((begin, self._now()))

    def begin_outside(self) -> None:
        """Begin code of the user's outside the backbone."""
        self._since = self._now()

    def end_outside(self, stage: int, op: Op) -> None:
        """End it, and count it as a part of an action."""
        if self.is_on and self._since is not None:
            self._outside[stage, op].append((self._since, self._now()))
        self._since = None

    def take(self) -> dict[tuple[int, Op], float]:
        """The time of each kind of action, in seconds; ends the measurement."""
        if self._on_cuda:
            torch.cuda.synchronize()
        found = {
            key: statistics.median(map(self._seconds, spans))
            for key, spans in self._actions.items()
        }
        for key, spans in self._outside.items():  # several a micro-batch
            total = sum(map(self._seconds, spans))
            found[key] = found.get(key, 0.0) + total / max(len(self._actions[key]), 1)
        for key, seconds in self._beside.items():
            found[key] = found.get(key, 0.0) + statistics.median(seconds)
        self.is_on = False
        self._beside.clear()
        self._actions.clear()
        self._outside.clear()
        return found

    def _now(self) -> _Mark:
        if not self.is_on:
            return None
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, span: tuple[_Mark, _Mark]) -> float:
        begin, end = span
        return float(begin.elapsed_time(end) / 1e3 if self._on_cuda else end - begin)
