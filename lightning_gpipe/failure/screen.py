"""What a failed run leaves on the terminal: one line per rank, one traceback, the error last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from traceback import TracebackException, walk_tb
from types import TracebackType

from lightning_gpipe.failure.frames import is_users
from lightning_gpipe.failure.reason import Failure

_FAILURE = "_lightning_gpipe_failure"  # where an exception keeps what the run failed of


def say(text: str) -> None:
    """Print, unless the terminal is gone or doesn't read."""
    printing = threading.Thread(target=_print, args=(text,), name="gpipe-say", daemon=True)
    printing.start()
    printing.join(1.0)


def _print(text: str) -> None:
    with suppress(OSError, ValueError):
        # in one piece: other ranks print at the same time
        sys.stderr.write(f"\n{text}\n" if not text.startswith("\n") else f"{text}\n")
        sys.stderr.flush()


def traceback_of(error: BaseException) -> str:
    """An exception's traceback, with what the user wrote and what that called last."""
    told = TracebackException.from_exception(error)
    _shorten(told, error)
    return "".join(told.format()).rstrip()


def _shorten(told: TracebackException, error: BaseException) -> None:
    """Leave out libraries' frames, up to the last of the user's, in an exception and its causes."""
    users = [is_users(frame) for frame, _ in walk_tb(error.__traceback__)]
    last = max((place for place, own in enumerate(users) if own), default=0)
    if len(users) == len(told.stack):
        told.stack[:] = [
            line for place, line in enumerate(told.stack) if users[place] or place >= last
        ]
    for inner, cause in (
        (told.__cause__, error.__cause__),
        (told.__context__, error.__context__),
    ):
        if inner is not None and cause is not None:
            _shorten(inner, cause)


class LastWord:
    """What an exception prints that ends this process, in the place of ``sys.excepthook``.

    Where the error arose it is the traceback, without the libraries' frames. Elsewhere the
    exception is a consequence, and its traceback would bury the first. Rank 0 repeats the first
    error when the others are silent.

    Args:
        failure: The first failure of the run.
        rank: This process.
        wait: Waits, not for long, until the processes that this one started have ended.
    """

    def __init__(self, failure: Failure, rank: int, wait: Callable[[], None]) -> None:
        self._failure, self._rank, self._wait = failure, rank, wait
        self._before = sys.excepthook

    @classmethod
    def install(
        cls, error: BaseException, failure: Failure, rank: int, wait: Callable[[], None]
    ) -> None:
        """Let it print the exception that ends the run here; others are printed as ever."""
        if isinstance(sys.excepthook, LastWord):
            sys.excepthook = sys.excepthook._before
        sys.excepthook = cls(failure, rank, wait)
        # no reference to the error: its frames hold process groups, for which others wait
        vars(error)[_FAILURE] = failure

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """See ``sys.excepthook``."""
        if not self._is_of(error):
            self._before(kind, error, trace)
            if not any(map(self._is_of, _contexts(error))):  # else it arose in the teardown
                return
        elif self._failure.rank == self._rank:
            say(f"[rank {self._rank}] {traceback_of(error)}")
        if self._rank == 0:
            self._wait()
            say(f"\n{self._failure}")

    def _is_of(self, error: BaseException) -> bool:
        return vars(error).get(_FAILURE) is self._failure


def _contexts(error: BaseException) -> Iterator[BaseException]:
    """What was handled when an exception was raised, and what was when that one was."""
    seen = {id(error)}
    while error.__context__ is not None and id(error.__context__) not in seen:
        error = error.__context__
        seen.add(id(error))
        yield error
