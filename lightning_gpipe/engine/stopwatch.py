"""When the actions of a rank ran: told to who listens, and to PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

from lightning_gpipe.comm.waiting import waiting
from lightning_gpipe.schedule.actions import Action
from lightning_gpipe.schedule.measured import Measured

#: A moment: seconds, or an event on the device's stream.
_Mark: TypeAlias = Any
_Row: TypeAlias = tuple[Action, int, _Mark, _Mark, _Mark, _Mark, float, bool]


class Stopwatch:
    """Measures actions while somebody listens; see :class:`ActionRecording`.

    What the processor does beside the layers' work counts as a part of an action, but for waits. A
    GPU doesn't wait for it.

    Args:
        device: Where they run. On a GPU it is the time there that counts.
    """

    # These run around every action, with the processor's caches full of the layers' data: each
    # function that is called and each object that is made takes microseconds.

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._now: Callable[[], _Mark] = _event if self.on_cuda else perf_counter
        self._since: _Mark = None
        self._start = self._begin = self._end = None
        self._waited = self._waited_inside = 0.0
        self.recordings: list[ActionRecording] = []
        #: Counts the parts of programs that all ranks of the pipeline run together.
        self.section = 0
        #: Samples of the mini-batch that has begun last.
        self.samples = 0

    def start(self) -> None:
        """Come to an action, and to all that belongs to it, such as its messages."""
        self._start = self._end = None
        if self.recordings:
            self._waited, self._start = waiting.seconds, self._now()

    def begin(self) -> None:
        """Begin the layers of an action."""
        if self._start is not None:
            self._begin, self._waited_inside = self._now(), waiting.seconds

    def end(self) -> None:
        """End them."""
        if self._start is not None:
            self._waited += waiting.seconds - self._waited_inside
            self._end = self._now()

    def done(self, action: Action) -> None:
        """End an action. It isn't told of where its layers have failed."""
        if self._end is None:
            return
        done, beside = self._end, 0.0
        if not self.on_cuda:
            done = self._now()
            waited = waiting.seconds - self._waited
            beside = self._begin - self._start + done - self._end - waited
        row = action, self.section, self._start, self._begin, self._end, done, beside, False
        for recording in self.recordings:
            recording.rows.append(row)

    def begin_outside(self) -> None:
        """Begin code of the user's outside the backbone."""
        self._since = self._now() if self.recordings else None

    def end_outside(self, action: Action) -> None:
        """End it, and count it as a part of an action."""
        since, self._since = self._since, None
        if self.recordings and since is not None:
            now = self._now()
            for recording in self.recordings:
                recording.rows.append((action, self.section, since, since, now, now, 0.0, True))


def _event() -> _Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def span(name: str, action: Action | None = None) -> AbstractContextManager[Any]:
    """Show what runs inside this context in PyTorch's profiler, while that works."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(name if action is None else f"{name} {action!r}")


class ActionRecording:
    """What a stopwatch measures while this is on.

    Args:
        watch: The stopwatch.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        #: What a :class:`Measured` is made of.
        self.rows: list[_Row] = []

    def resume(self) -> None:
        """Be on."""
        if self not in self._watch.recordings:
            self._watch.recordings.append(self)

    def pause(self) -> None:
        """Be off."""
        if self in self._watch.recordings:
            self._watch.recordings.remove(self)

    def take(self) -> list[Measured]:
        """What was measured since the last time, by ``time.perf_counter``; waits for a GPU."""
        rows, self.rows = self.rows, []
        found = list(map(Measured._make, rows))
        if not self._watch.on_cuda:
            return found
        torch.cuda.synchronize(self._watch.device)
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        now = perf_counter()

        def seconds(event: _Mark) -> float:
            return now - float(event.elapsed_time(last)) / 1e3

        return [one.retimed(seconds) for one in found]
