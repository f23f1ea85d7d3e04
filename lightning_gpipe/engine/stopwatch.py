"""When the actions of a rank ran: told to who listens, and to PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler

from lightning_gpipe.schedule.actions import Action
from lightning_gpipe.schedule.measured import Measured

#: A moment: seconds, or an event on the device's stream.
_Mark: TypeAlias = Any
_NOTHING = nullcontext()


class Stopwatch:
    """Measures actions while somebody listens; see :class:`Recording`.

    Args:
        device: Where they run. On a GPU it is the time there that counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._since: _Mark = None
        self.recordings: list[Recording] = []
        #: When the layers of the action that runs began and ended, and their processor time.
        self.of_layers: tuple[_Mark, _Mark, float] | None = None
        #: Counts the parts of programs that all ranks of the pipeline run together.
        self.section = 0
        #: Samples of the mini-batch that has begun last.
        self.samples = 0

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Run all that belongs to an action inside this context, such as its messages.

        What the processor does beside the layers' work counts as a part of the action. A GPU
        doesn't wait for it. While PyTorch's profiler works, the action is a span there.
        """
        measuring = _Around(self, action) if self.recordings else _NOTHING
        return _profiled(action, measuring) if profiler._is_profiler_enabled else measuring

    def layers(self) -> AbstractContextManager[None]:
        """Run the layers of an action inside this context."""
        return _Layers(self) if self.recordings else _NOTHING

    def begin_outside(self) -> None:
        """Begin code of the user's outside the backbone."""
        self._since = self.now()

    def end_outside(self, action: Action) -> None:
        """End it, and count it as a part of an action."""
        since, self._since = self._since, None
        if self.recordings and since is not None:
            now = self.now()
            self.tell(Measured(action, self.section, since, since, now, now, is_outside=True))

    def tell(self, measured: Measured) -> None:
        """Tell all who listen."""
        for recording in self.recordings:
            recording.add(measured)

    def now(self) -> _Mark:
        """This moment."""
        if not self.recordings:
            return None
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# Classes rather than generators: these run around every action.


class _Around:
    """All that belongs to an action."""

    __slots__ = "_action", "_start", "_watch", "_worked"

    def __init__(self, watch: Stopwatch, action: Action) -> None:
        self._watch, self._action = watch, action

    def __enter__(self) -> None:
        self._watch.of_layers = None
        self._worked, self._start = time.thread_time(), self._watch.now()

    def __exit__(self, *error: object) -> None:
        watch, ran = self._watch, self._watch.of_layers
        if ran is None:
            return
        begin, end, inside = ran
        done, beside = end, 0.0
        if not watch.on_cuda:
            done, beside = watch.now(), time.thread_time() - self._worked - inside
        watch.tell(Measured(self._action, watch.section, self._start, begin, end, done, beside))


class _Layers:
    """The layers of an action."""

    __slots__ = "_begin", "_watch", "_worked"

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._begin, self._worked = self._watch.now(), time.thread_time()

    def __exit__(self, kind: object, *error: object) -> None:
        worked = time.thread_time() - self._worked
        if kind is None:
            self._watch.of_layers = self._begin, self._watch.now(), worked


@contextmanager
def _profiled(action: Action, measuring: AbstractContextManager[None]) -> Iterator[None]:
    with profiler.record_function(f"gpipe {action!r}"), measuring:
        yield


class Recording:
    """What a stopwatch measures while this is on.

    Args:
        watch: The stopwatch.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._measured: list[Measured] = []

    def resume(self) -> None:
        """Be on."""
        if self not in self._watch.recordings:
            self._watch.recordings.append(self)

    def pause(self) -> None:
        """Be off."""
        if self in self._watch.recordings:
            self._watch.recordings.remove(self)

    def add(self, measured: Measured) -> None:
        """Keep what was measured."""
        self._measured.append(measured)

    def take(self) -> list[Measured]:
        """What was measured since the last time, by ``time.perf_counter``; waits for a GPU."""
        found, self._measured = self._measured, []
        if not self._watch.on_cuda:
            return found
        torch.cuda.synchronize(self._watch.device)
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        now = time.perf_counter()

        def seconds(event: _Mark) -> float:
            return now - float(event.elapsed_time(last)) / 1e3

        return [
            one._replace(
                start=seconds(one.start),
                begin=seconds(one.begin),
                end=seconds(one.end),
                done=seconds(one.done),
            )
            for one in found
        ]
