"""SIGTERM ends a run on every rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import SIGTERMException


class EndOnSigterm:
    """Raises in the main thread when SIGTERM comes, and passes it on to the processes it started.

    It stands in for Lightning's handler, which waits for the other ranks in the middle of a step,
    where they may wait for this one. Lightning puts the user's own handler back after the run.

    Args:
        pass_on: Sends a signal to the processes that this one has started.
    """

    def __init__(self, pass_on: Callable[[int], object]) -> None:
        self._pass_on = pass_on
        self._process = os.getpid()

    def install(self) -> None:
        """Take Lightning's place, if it has one: only then is a run under way that can end."""
        installed = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and installed not in (signal.SIG_DFL, self):
            signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: object) -> None:
        """End this process: with an error that all ranks hear of, or at once in a forked child."""
        if os.getpid() != self._process:  # a loader's worker, which inherits the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._pass_on(number)
        raise SIGTERMException("SIGTERM was received")
