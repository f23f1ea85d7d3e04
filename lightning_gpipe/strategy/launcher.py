"""Starting processes by scripts, spawn and fork."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.strategy import _lightning, advice
from lightning_gpipe.strategy.children import STARTED_BY, PatientlySeen, children
from lightning_gpipe.strategy.monitor import PipelineMonitor
from lightning_gpipe.strategy.rendezvous import leave_before_fork


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
        os.environ[STARTED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[STARTED_BY]
        children[:] = [PatientlySeen(p, self._deadlines.patience_s) for p in self.procs]
        self.procs[:] = self._seen()

    @staticmethod
    def _seen() -> list[Any]:
        return [*children]


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
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        figures = [monitor.figures for monitor in _monitors(trainer)]
        return {**super().get_extra_results(trainer), "figures": pickle.dumps(figures)}

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        told = pickle.loads(extra["figures"])
        for monitor, figures in zip(_monitors(trainer), told, strict=True):
            monitor.figures = figures

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


def _monitors(trainer: Any) -> list[PipelineMonitor]:
    return [each for each in trainer.callbacks if isinstance(each, PipelineMonitor)]
