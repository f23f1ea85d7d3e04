"""Starting processes by scripts, spawn and fork."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.reason import DIED, Failure
from lightning_gpipe.strategy import _lightning, advice, returning
from lightning_gpipe.strategy.children import (
    STARTED_BY,
    PatientlySeen,
    children,
    refuse_another_number,
)
from lightning_gpipe.strategy.rendezvous import forget_meeting, keep_port, leave_before_fork
from lightning_gpipe.strategy.signals import INTERRUPTED, LetChildrenSave


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
            refuse_another_number(self.num_processes)
        self.is_running = True
        try:
            result = super().launch(function, *args, **kwargs)
        finally:
            self.is_running = False
        self._finish()
        return result

    @override
    def _call_children_scripts(self) -> None:
        advice.refuse_in_foreign_worker("popen")
        advice.refuse_no_file()
        advice.warn_in_child()
        os.environ[STARTED_BY] = f"{os.getpid()} {self.num_processes}"
        keep_port(self.cluster_environment)
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

    has_lost_run = False  # the last fit has ended with an error, and its processes are gone
    has_saved = False  # and on Ctrl-C, after all had saved
    _verdict: Any = None
    _folder = ""  # for what goes from the children to this process, if it is large
    _python: Any = None  # the state of Python's generator, which a fork seeds anew

    @property
    def has_fit(self) -> bool:
        """Whether a fit has run, in processes that are gone."""
        return self._already_fit

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer = kwargs.get("trainer")
        if trainer is not None:
            advice.refuse_tuner(trainer, self._start_method)
            if trainer.state.fn == TrainerFn.PREDICTING:
                advice.warn_of_no_predictions(function, args, self._start_method)
        if self._start_method == "spawn":
            advice.refuse_in_foreign_worker("spawn")
        if self._start_method == "fork":
            advice.refuse_fork_of_autograd()
            leave_before_fork()
            self._python = random.getstate()
        keep_port(self._strategy.cluster_environment)
        # shared with the children, who know why the run ends
        self._verdict = multiprocessing.get_context(self._start_method).RawArray(
            ctypes.c_char, 1 << 15
        )
        before = self.procs
        callbacks = trainer.callbacks if trainer is not None else ()
        saving = LetChildrenSave(callbacks, rank_zero_info)
        try:
            with tempfile.TemporaryDirectory() as self._folder, saving.running():
                result = super().launch(function, *args, **kwargs)
            self.has_lost_run = False
            return result
        except BaseException as error:
            self.has_lost_run = self.procs is not before and not self.has_fit
            if isinstance(error, ProcessException):
                verdict = self._verdict.value.decode(errors="replace") or self._killed(error)
                error.args = (f"{error.msg}\n\n{verdict}" if verdict else error.msg,)
            raise
        finally:
            self._verdict, self.has_saved = None, saving.has_saved

    def _killed(self, error: ProcessException) -> str:
        """Which process was killed, where the others were ended before they could tell."""
        if getattr(error, "signal_name", None) is None:
            return ""
        strategy: Any = self._strategy
        rank = strategy.node_rank * strategy.num_processes + error.error_index
        return str(Failure(rank, rank % strategy.stages, DIED, "died"))

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
        # a file: nobody reads from the queue until the processes have ended, and it takes 64 KiB
        extra = {**super().get_extra_results(trainer), "run": returning.of_run(trainer)}
        file = Path(self._folder, "extra")
        torch.save(extra, file)
        return {"file": str(file)}

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        extra = torch.load(worker_output.extra["file"], weights_only=False)
        returning.take_types(trainer, extra["run"]["types"])
        shapes, weights = extra["run"]["shapes"], worker_output.weights_path
        returning.take_new_buffers(trainer.lightning_module, shapes, weights)
        super()._recover_results_in_main_process(worker_output._replace(extra=extra), trainer)

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        returning.take(trainer, extra["run"])

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        strategy: Any = self._strategy
        self.procs, self.has_lost_run = [], False  # of the process that has started this one
        forget_meeting()
        if self._python is not None:
            gc.freeze()  # what is left of groups would wait for threads that a fork hasn't got
            random.setstate(self._python)
            # PyTorch makes its threads anew after a fork when they are first asked for, and not
            # even two threads may ask at a time
            torch.set_num_threads(torch.get_num_threads())
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
                raise SystemExit(INTERRUPTED) from None  # else it counts as a success
            raise
