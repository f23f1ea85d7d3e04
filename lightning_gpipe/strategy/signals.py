"""Signals: SIGTERM ends a run on every rank, and a requeue waits for the end of the step.

Lightning's own handlers wait for other ranks in the middle of a step, where they may wait for this
one. Lightning puts the user's handlers back after the run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gpipe.strategy import _lightning


class EndOnSigterm:
    """Raises in the main thread when SIGTERM comes, and passes it on to the processes it started.

    Args:
        pass_on: Sends a signal to the processes that this one has started.
        is_ending: Whether the run ends already.
    """

    def __init__(self, pass_on: Callable[[int], object], is_ending: Callable[[], bool]) -> None:
        self._pass_on, self._is_ending = pass_on, is_ending
        self._process = os.getpid()
        self._users: list[Callable[..., Any]] = []
        self._connectors: list[_lightning.SignalConnector] = []

    def install(self) -> None:
        """Take the place of Lightning's handler, but not of the user's, if there is one."""
        handlers = _handlers_of_lightning(signal.SIGTERM)
        if handlers is None:
            return
        owners = [getattr(handler, "__self__", None) for handler in handlers]
        self._connectors = [o for o in owners if isinstance(o, _lightning.SignalConnector)]
        self._users = [
            handler
            for handler, owner in zip(handlers, owners, strict=True)
            if callable(handler) and owner not in self._connectors
        ]
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: object) -> None:
        """End this process: with an error that all ranks hear of, or at once in a forked child."""
        if os.getpid() != self._process:  # a loader's worker, which inherits the handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for connector in self._connectors:
            connector.received_sigterm = True  # which callbacks read
        for handler in self._users:
            handler(number, frame)
        if not self._is_ending():
            self._pass_on(number)
            raise SIGTERMException("SIGTERM was received")


class Requeue:
    """Keeps the signal with which SLURM announces the end until all ranks can save.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.is_pending = False
        self._number = number
        self._handlers: list[Any] = []

    def install(self) -> None:
        """Take the place of Lightning's handler, if there is one."""
        handlers = _handlers_of_lightning(self._number)
        if handlers is not None:
            self._handlers = handlers
            signal.signal(self._number, self)

    def __call__(self, number: int, frame: object) -> None:
        """Note the signal."""
        self.is_pending = True

    def run(self) -> None:
        """Save and requeue, as Lightning does. Collective over all processes."""
        self.is_pending = False
        for handler in self._handlers:
            handler(self._number, None)


def _handlers_of_lightning(number: signal.Signals) -> list[Any] | None:
    """What Lightning's handler of a signal calls; None: it has none that this thread can change."""
    installed: Any = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(installed, _lightning.HandlersCompose):
        return list(installed.signal_handlers)
    return None
