"""Sends on a thread of its own, so that a stage computes on while its output leaves.

Preparing a message and handing it to gloo takes a few hundred microseconds per micro-batch, and
would be paid on the critical path of every stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Courier:
    """Runs errands one after the other, in the order in which they were given."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gpipe-courier", daemon=True)
        self._thread.start()

    def give(self, errand: Callable[[], None]) -> None:
        """Give an errand.

        Raises:
            RuntimeError: If an earlier one failed.
        """
        self._check()
        self._errands.put(errand)

    def flush(self) -> None:
        """Wait until all errands are done.

        Raises:
            RuntimeError: If one failed.
        """
        done = threading.Event()
        self._errands.put(done.set)
        done.wait()
        self._check()

    def close(self) -> None:
        """End the thread once all errands are done, or at the end of the one that is under way."""
        self._errands.put(None)

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"Sending to another stage failed: {self._error}") from self._error

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                errand()
            except BaseException as error:  # the stage's own thread raises it
                self._error = self._error or error
