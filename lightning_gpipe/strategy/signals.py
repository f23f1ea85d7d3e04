"""Signals: SIGTERM ends a run on all ranks; a requeue waits for a step's end.

Where a callback saves on exceptions, Ctrl-C, and SIGTERM in training, wait for that as well: all
ranks must save together.

Lightning's own handlers wait for other ranks in the middle of a step, where they may wait for this
one. Lightning puts the user's handlers back after the run.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_gpipe.strategy import _lightning

#: The message of the exception by which SIGTERM ends a run.
SIGTERM_CAME = "SIGTERM was received"
#: With what a process that Ctrl-C has ended exits.
INTERRUPTED = 128 + signal.SIGINT
_SAVING_S = 60.0  # in which processes must have saved and ended after Ctrl-C
_AGAIN_S = 0.5  # in which the same signal may come from a group, a wrapper and a launcher


class EndOnSigterm:
    """Raises in the main thread when SIGTERM comes, and passes it on to the processes it started.

    Where something will be saved after the step, it does so when SIGTERM comes once more.

    Args:
        pass_on: Sends a signal to the processes that this one has started.
        is_ending: Whether the run ends already.
    """

    def __init__(self, pass_on: Callable[[int], object], is_ending: Callable[[], bool]) -> None:
        self._pass_on, self._is_ending, self._repeats = pass_on, is_ending, _Repeats()
        #: What saves after the step if it comes in training; None: nothing does.
        self.saving: SaveOnSignal | None = None
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
        for handler in self._users:
            handler(number, frame)
        if self._repeats.is_one():
            return
        is_ending, trainers = self._is_ending(), [owner.trainer for owner in self._connectors]
        if not is_ending:
            trains = any(trainer.training for trainer in trainers)
            if trains and self.saving is not None and self.saving.on_sigterm():
                return  # all ranks hear of it behind the step
            self._pass_on(number)
        self.tell()
        if not is_ending:
            raise SIGTERMException(SIGTERM_CAME)

    def tell(self) -> None:
        """Let Trainers tell callbacks that it has come."""
        for connector in self._connectors:
            connector.received_sigterm = True


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


class SaveOnSignal:
    """Keeps Ctrl-C and SIGTERM until all ranks can save, where a callback saves on exceptions.

    The second signal ends the run at once, without a checkpoint.

    Args:
        callbacks: The Trainer's.
        say: Tells the user what will happen.
    """

    def __init__(self, callbacks: Iterable[Any], say: Callable[[str], object]) -> None:
        self.is_pending = self.is_sigterm = False
        self.has_saved = False
        self._say = say
        self._process = os.getpid()
        self._savers = _savers(callbacks)
        self._before: Any = signal.SIG_DFL
        self._repeats = _Repeats()

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to save; the same on every rank."""
        return bool(self._savers)

    def install(self) -> None:
        """Take the place of the handler, which Lightning puts back after the run."""
        is_main = threading.current_thread() is threading.main_thread()
        current = signal.getsignal(signal.SIGINT)
        if self._savers and is_main and callable(current) and current != self:
            self._before = current
            signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: object) -> None:
        """Note the first Ctrl-C, and let the second through."""
        if os.getpid() == self._process and self._repeats.is_one():
            return
        if self.is_pending or os.getpid() != self._process:
            signal.signal(signal.SIGINT, self._before)
            self._before(number, frame)
            return
        self.is_pending = True
        self._say(
            "Ctrl-C: the run saves after this step of training, or the one that follows the"
            " validation, and ends. Press it again to end at once."
        )

    def on_sigterm(self) -> bool:
        """Note a SIGTERM; returns whether anything will be saved."""
        if self.is_pending or not self._savers:
            return False
        self.is_pending = self.is_sigterm = True
        self._say("SIGTERM: the run saves after this step, and ends.")
        return True

    def run(self, trainer: Any, error: BaseException) -> None:
        """Save as the callbacks do on an exception, and end the run. Collective over the world.

        Args:
            trainer: The Trainer.
            error: The exception, which is raised.
        """
        installed: Any = signal.getsignal(signal.SIGINT)
        if installed == self:
            signal.signal(signal.SIGINT, self._before)
        for callback in self._savers:
            callback.on_exception(trainer, trainer.lightning_module, error)
        self.has_saved = True
        raise error


class LetChildrenSave:
    """Keeps Ctrl-C from the process that has forked or spawned a run's, until these have saved.

    A terminal sends it to all of them. The second Ctrl-C ends the run at once, and so does the
    first one where nothing is to be saved.

    Args:
        callbacks: The Trainer's.
        say: Tells the user what will happen.
    """

    def __init__(self, callbacks: Iterable[Any], say: Callable[[str], object]) -> None:
        self.has_saved = False
        self._is_wanted = bool(_savers(callbacks))
        self._say = say
        self._process = os.getpid()
        self._before: Any = None
        self._repeats = _Repeats()
        self._limit = threading.Timer(_SAVING_S, os.kill, (self._process, signal.SIGINT))
        self._limit.daemon = True

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Run the processes to their end inside this context.

        Raises:
            KeyboardInterrupt: If they have ended after Ctrl-C.
        """
        current = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if not (self._is_wanted and is_main and callable(current)):
            yield
            return
        self._before = current
        signal.signal(signal.SIGINT, self)
        try:
            yield
        except ProcessExitedException as error:
            self.has_saved = self._limit.is_alive() and error.exit_code == INTERRUPTED
            if self.has_saved:
                raise KeyboardInterrupt from None
            raise
        finally:
            self._limit.cancel()
            if signal.getsignal(signal.SIGINT) == self:
                signal.signal(signal.SIGINT, current)

    def __call__(self, number: int, frame: object) -> None:
        """Note the first, and let the second through."""
        if os.getpid() == self._process and self._repeats.is_one():
            return
        if self._limit.is_alive() or os.getpid() != self._process:
            signal.signal(signal.SIGINT, self._before)
            self._before(number, frame)
            return
        self._limit.start()
        self._say(f"Ctrl-C: waits {_SAVING_S:.0f} s at most until the run's processes have ended.")


class _Repeats:
    """Tells a signal from the same one, which somebody else has sent as well."""

    def __init__(self) -> None:
        self._time = -math.inf

    def is_one(self) -> bool:
        """Note that a signal comes; returns whether it is the same one again."""
        now = time.monotonic()
        if now - self._time < _AGAIN_S:
            return True
        self._time = now
        return False


def _savers(callbacks: Iterable[Any]) -> list[Any]:
    return [callback for callback in callbacks if _saves_on_exception(callback)]


def _saves_on_exception(callback: Any) -> bool:
    return isinstance(callback, OnExceptionCheckpoint) or (
        isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    )


def _handlers_of_lightning(number: signal.Signals) -> list[Any] | None:
    """What Lightning's handler of a signal calls; None: it has none that this thread can change."""
    installed: Any = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and isinstance(installed, _lightning.HandlersCompose):
        return list(installed.signal_handlers)
    return None
