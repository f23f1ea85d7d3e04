"""Starting processes by scripts, spawn and fork, and what becomes of the others when one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.screen import say
from lightning_gpipe.strategy import _lightning, advice
from lightning_gpipe.strategy.rendezvous import leave_before_fork

_STARTED_BY = "LIGHTNING_GPIPE_STARTED_BY"
_TICK_S = 0.2
#: The processes of this node that this one has started, by local rank less one.
_children: list[PatientlySeen] = []
#: The process of local rank 0, in those that it has started.
_parent = os.getppid() if os.environ.pop(_STARTED_BY, "") == str(os.getppid()) else None


class ScriptLauncher(_lightning.ScriptLauncher):
    """Lightning's, which kills all processes when it sees that one failed: but not at once.

    Args:
        environment: Ranks and addresses.
        num_processes: Of this node.
        num_nodes: Nodes.
        finish: Called when a run is over on this rank, with all its hooks.
        deadlines: How long what is waited for.
    """

    def __init__(
        self,
        environment: Any,
        num_processes: int,
        num_nodes: int,
        finish: Callable[[], None],
        deadlines: Deadlines,
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._finish, self._deadlines = finish, deadlines
        self.is_running = False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.cluster_environment.creates_processes_externally:
            self.procs = self._seen()  # an earlier Trainer's launcher has started them
        self.is_running = True
        try:
            result = super().launch(function, *args, **kwargs)
        finally:
            self.is_running = False
        self._finish()
        return result

    @override
    def _call_children_scripts(self) -> None:
        os.environ[_STARTED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_STARTED_BY]
        _children[:] = [PatientlySeen(p, self._deadlines.patience_s) for p in self.procs]
        self.procs[:] = self._seen()

    @staticmethod
    def _seen() -> list[Any]:
        return [*_children]


class PatientlySeen:
    """A child process that seems to run until the others have had time to hear of its failure.

    Args:
        process: The child.
        patience_s: The time that they have.
    """

    def __init__(self, process: Any, patience_s: float) -> None:
        self.returncode: int | None = None
        self._process, self._patience_s = process, patience_s
        self._failed: float | None = None

    def poll(self) -> int | None:
        """Look whether the process has ended; see ``subprocess.Popen``."""
        code: int | None = self._process.poll()
        if code:
            self._failed = self._failed or time.monotonic()
            if time.monotonic() - self._failed < self._patience_s:
                return None
        self.returncode = code
        return code

    def poll_now(self) -> int | None:
        """The exit code, as soon as there is one."""
        code: int | None = self._process.poll()
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


class MultiProcessingLauncher(_lightning.MultiProcessingLauncher):
    """Lightning's, whose children handle no errors: they report theirs before they end."""

    _verdict: Any = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._start_method == "fork":
            advice.refuse_fork_of_autograd()
            leave_before_fork()
        # shared with the children, who know why the run ends
        self._verdict = multiprocessing.get_context(self._start_method).RawArray(
            ctypes.c_char, 1 << 15
        )
        try:
            return super().launch(function, *args, **kwargs)
        except ProcessException as error:
            verdict = self._verdict.value.decode(errors="replace")
            error.args = (f"{error.msg}\n\n{verdict}" if verdict else error.msg,)
            raise
        finally:
            self._verdict = None

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        strategy: Any = self._strategy
        with warnings.catch_warnings():
            if strategy.holds_parts:
                rank_zero_warn(
                    "The module was built on the meta device, and each process that was started"
                    f" for this run by {self._start_method} holds a part of it, until it ends now."
                    " Keep the weights in a checkpoint, saved inside the run, as ModelCheckpoint"
                    " does; or let the script run once per process (start_method='popen')."
                )
                warnings.filterwarnings("ignore", message=".* is saved without values")
            return super()._collect_rank_zero_results(trainer, results)

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        strategy: Any = self._strategy
        try:
            super()._wrapping_function(*args, **kwargs)
            strategy.finish()
        except BaseException as error:
            strategy.on_exception(error)
            failure = strategy.failure
            if failure is not None:
                self._verdict.value = str(failure).encode()[: len(self._verdict) - 1]
                if failure.rank != strategy.global_rank:
                    time.sleep(3.0)  # who fails first is whose error the launcher shows
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(128 + signal.SIGINT) from None  # else it counts as a success
            raise


def wait_for_children(seconds: float) -> None:
    """Wait until the processes that this one has started have ended."""
    end = time.monotonic() + seconds
    for child in _children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))


@contextmanager
def expecting_all(first_rank: int, grace_s: float) -> Iterator[None]:
    """Wait for all ranks to come inside, where nobody else would notice that one is gone.

    Args:
        first_rank: The global rank of the node's first process.
        grace_s: For the main thread to hear of it; else the process ends.

    Raises:
        RuntimeError: Instead of a lost connection, if a process that this one has started, or that
            has started this one, has ended.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_TICK_S):
            gone = _who_is_gone(first_rank)
            if gone is not None and not over.wait(grace_s):
                say(gone)
                _end_children()
                os._exit(1)

    threading.Thread(target=watch, name="gpipe-expecting", daemon=True).start()
    try:
        yield
    except Exception:
        end = time.monotonic() + 1.0
        while (gone := _who_is_gone(first_rank)) is None and time.monotonic() < end:
            time.sleep(_TICK_S)  # its connections end before it does
        if gone is None:
            raise
        _end_children()
        raise RuntimeError(gone) from None
    finally:
        over.set()


def _who_is_gone(first_rank: int) -> str | None:
    found = [(rank, child.poll_now()) for rank, child in enumerate(_children, first_rank + 1)]
    gone = [f"Rank {rank} ended (exit code {code})" for rank, code in found if code is not None]
    if _parent is not None and os.getppid() != _parent:
        gone = [f"Rank {first_rank} ended"]
    if not gone:
        return None
    return (
        f"{'; '.join(gone)} while the others wait for it to begin a run. Build the same Trainers on"
        " every rank, and call fit, validate, test and predict on them alike: no rank may leave"
        " the script before."
    )


def _end_children() -> None:
    for child in _children:
        with suppress(OSError):
            child.terminate()
