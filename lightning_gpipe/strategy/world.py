"""The processes of a run: their places, groups, watchdog and signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gpipe.comm.generators import SharedGenerators
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.comm.nearby import Nearby
from lightning_gpipe.engine.trial import Trial
from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.reason import Failure, FailureKind, text_of
from lightning_gpipe.failure.screen import LastWord
from lightning_gpipe.failure.watchdog import Watchdog
from lightning_gpipe.strategy import _lightning, collectives
from lightning_gpipe.strategy.children import expecting_all, wait_for_children
from lightning_gpipe.strategy.reader import size_told_of
from lightning_gpipe.strategy.rendezvous import (
    explain_connections,
    join_world,
    leave_world,
    telling_who_waits,
)
from lightning_gpipe.strategy.signals import SIGTERM_CAME, EndOnSigterm, Requeue, SaveOnSignal


@dataclass(frozen=True, slots=True)
class Layout:
    """A process's place. The ranks of a pipeline are adjacent.

    Args:
        rank: This process.
        world_size: The number of processes.
        stages: K.
        virtual_stages: V.
        joins_ends: Whether the first and the last stage have a channel of their own.
        writes_together: Whether every process writes its part of a checkpoint.
        shards_optimizers: Whether replicas share out optimizers' state.
    """

    rank: int
    world_size: int
    stages: int
    virtual_stages: int
    joins_ends: bool = False
    writes_together: bool = False
    shards_optimizers: bool = False

    @property
    def stage(self) -> int:
        """The stage that this process runs."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """This process's pipeline."""
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        """D, the number of pipelines."""
        return self.world_size // self.stages

    @property
    def is_spread(self) -> bool:
        """Whether a process holds only a part of the model, or of the optimizers' state."""
        return self.stages > 1 or (self.shards_optimizers and self.replicas > 1)

    def check(self) -> None:
        """Refuse a number of processes that pipelines can't be made of.

        Raises:
            RuntimeError: If this process was started for a run of more processes.
            ValueError: With what to do instead.
        """
        if self.rank >= self.world_size:
            raise RuntimeError(
                f"This process was started as rank {self.rank} of another run, and this Trainer has"
                f" {self.world_size} process{'es' * (self.world_size > 1)}. A script runs from its"
                " top in each process that a Trainer starts: keep a run with fewer devices in a"
                " script of its own, or give GPipeStrategy(start_method='spawn')."
            )
        check_division(self.world_size, self.stages)


def check_division(processes: int, stages: int) -> None:
    """Check that processes make whole pipelines.

    Args:
        processes: Of all nodes.
        stages: K.

    Raises:
        ValueError: With what to do instead.
    """
    if processes % stages:
        hint = " (On a CPU, devices='auto' means one.)" if processes == 1 else ""
        raise ValueError(
            f"{processes} process{'es' * (processes > 1)} can't be divided into pipelines of"
            f" stages={stages}: choose devices x num_nodes as a multiple of stages, or"
            f" stages='auto' for one pipeline per node.{hint}"
        )


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How processes find and wait for each other.

    Args:
        environment: Ranks and addresses.
        device: This process's device.
        backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up.
        deadlines: How long each side of a failure is waited for.
        processes: Of this node.
        nodes: The number of nodes.
    """

    environment: ClusterEnvironment
    device: torch.device
    backend: str | None
    timeout: timedelta
    deadlines: Deadlines
    processes: int
    nodes: int

    def backend_name(self) -> str:
        """The backend for the tensors, in small letters."""
        return (self.backend or _lightning.default_backend(self.device)).lower()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Wait for all processes inside, and say why if they don't come."""
        first = self.environment.node_rank() * self.processes
        with (
            expecting_all(first, self.deadlines.grace_s),
            telling_who_waits(self.environment, self.nodes, self.processes, self.timeout),
        ):
            try:
                yield
            except RuntimeError as error:
                raise explain_connections(
                    error, self.environment, self.nodes, self.timeout
                ) from None


class World:
    """The connected processes of a run: from ``setup_environment`` to ``teardown``. Collective.

    The watchdog goes on until :meth:`finish`, since hooks may fail after the teardown.

    Args:
        layout: This process's place.
        rendezvous: How the processes find each other.
        is_interrupted: Whether the run has failed, so that nobody can be waited for.
        pass_on: Sends a signal to the processes that this one has started.
    """

    def __init__(
        self,
        layout: Layout,
        rendezvous: Rendezvous,
        is_interrupted: Callable[[], bool],
        pass_on: Callable[[int], object],
    ) -> None:
        layout.check()
        self._layout, self._rendezvous = layout, rendezvous
        self._is_interrupted = is_interrupted
        self._watchdog: Watchdog | None = None
        self._abortable: list[Any] = []
        backend, device = rendezvous.backend_name(), rendezvous.device
        with rendezvous.expected():
            self.leave_own_group = join_world(
                rendezvous.environment, backend, rendezvous.timeout, device
            )
            self._abortable.append(dist.group.WORLD)
            if layout.world_size > 1:
                self._watchdog = self._watch()
            try:
                self.groups = Groups.connect(
                    layout.stages,
                    layout.virtual_stages,
                    backend,
                    device,
                    rendezvous.timeout,
                    layout.joins_ends,
                    layout.writes_together,
                )
            except BaseException as error:
                self.report(error)
                self._leave()
                raise
        self._abortable += [*self.groups.all_groups, self.groups.nearby]
        self.trial = Trial(self.groups.pipeline)
        self.generators = SharedGenerators(self.groups.pipeline)
        self._on_sigterm = EndOnSigterm(pass_on, is_interrupted)
        environment, self._requeue = rendezvous.environment, None
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = Requeue(environment.requeue_signal or signal.SIGUSR1)
        self._on_signal: SaveOnSignal | None = None
        self._told = ExitStack()
        self._told.enter_context(size_told_of(layout.stages, layout.replicas))

    @property
    def rank(self) -> int:
        """This process."""
        return self._layout.rank

    @property
    def is_spread(self) -> bool:
        """See :attr:`Layout.is_spread`."""
        return self._layout.is_spread

    @property
    def failure(self) -> Failure | None:
        """The first failure of the run, if it has failed."""
        return self._watchdog.failure if self._watchdog is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the Trainer, which is outside of the run."""
        return NoneType, ()

    def can_wait(self) -> bool:
        """Whether the other processes can be waited for."""
        return not self._is_interrupted()

    def close(self) -> None:
        """Leave the groups: with the others at the end of a run, at once after an error."""
        self._told.close()
        try:
            if self.can_wait():
                self.groups.close()
        finally:
            if not self.can_wait():
                self._leave()

    def finish(self) -> None:
        """Wait until all ranks are through with a run and its hooks. Collective.

        Raises:
            RemoteError: If another rank has failed in one of its hooks.
        """
        failure = self._watchdog.finish() if self._watchdog is not None else None
        if failure is not None:
            raise RemoteError(str(failure))
        self._leave()

    def report(self, error: BaseException) -> Failure | None:
        """Tell all ranks that the run has failed.

        Returns:
            The first failure of the run; None if nobody can tell.
        """
        kind: FailureKind | None = "sigterm" if isinstance(error, SIGTERMException) else None
        return self._watchdog.report(error, kind) if self._watchdog is not None else None

    @contextmanager
    def guarded(self, *spared: type[Exception]) -> Iterator[None]:
        """Tell every rank of an error at once, and raise the first one of the run.

        Args:
            spared: What isn't an error.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, spared) or self.trial.spares(error):
                raise
            first = self.report(error)
            if first is None or first.rank == self.rank or first.text in str(error):
                raise
            if first.text == text_of(error):  # every rank runs the step: it fails alike on all
                raise
            raise RemoteError(str(first)) from None

    def prepare_last_word(self, error: BaseException, failure: Failure) -> None:
        """Let the process end with the first failure of the run, when all have ended."""
        wait = partial(wait_for_children, self._rendezvous.deadlines.grace_s)
        LastWord.install(error, failure, self.rank, wait)

    @property
    def has_saved(self) -> bool:
        """Whether the run ends by Ctrl-C or SIGTERM, and all ranks have saved before."""
        return self._on_signal is not None and self._on_signal.has_saved

    def take_signals(self, callbacks: Iterable[Any] | None = None) -> None:
        """Take the place of Lightning's handlers, which it has just installed.

        One process has nobody who waits for it: Lightning's own do then.

        Args:
            callbacks: The Trainer's; None: steps don't begin yet, for the end of which signals
                could wait.
        """
        if self._layout.world_size == 1:
            return
        self._on_sigterm.install()
        if self._requeue is not None:
            self._requeue.install()
        if callbacks is None:
            return
        if self._on_signal is None:
            self._on_signal = SaveOnSignal(callbacks, rank_zero_info)
        self._on_sigterm.saving = self._on_signal
        self._on_signal.install()

    def end_steps(self) -> None:
        """Let no SIGTERM wait any more for the end of a step of training."""
        self._on_sigterm.saving = None

    def heed_signals(self, trainer: Any) -> None:
        """Do between two steps what a signal to any rank asks for. Collective.

        What comes in the validation of a fit waits for the next step of training.

        If SLURM has announced the end: save and requeue. On Ctrl-C and SIGTERM: save and end, where
        a callback saves on exceptions.

        Raises:
            KeyboardInterrupt: On Ctrl-C.
            SIGTERMException: On SIGTERM.
        """
        if trainer.state.fn == TrainerFn.FITTING and not trainer.training:
            return
        requeue, saving = self._requeue, self._on_signal
        if requeue is not None and self.groups.any_of_all(requeue.is_pending):
            requeue.run()
        if saving is None or not saving.is_wanted or not self.groups.any_of_all(saving.is_pending):
            return
        error: BaseException = KeyboardInterrupt()
        if self.groups.any_of_all(saving.is_sigterm):
            self._on_sigterm.tell()
            error = SIGTERMException(SIGTERM_CAME)
        saving.run(trainer, error)

    def _watch(self) -> Watchdog:
        layout, rendezvous = self._layout, self._rendezvous
        return Watchdog(
            layout.rank,
            layout.stages,
            layout.world_size,
            rendezvous.environment.main_address,
            collectives.broadcast,
            self._abort,
            rendezvous.device.type == "cpu",
            rendezvous.deadlines,
        )

    def _leave(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            if self._watchdog.failure is not None:
                for one in self._abortable:
                    if isinstance(one, Nearby):
                        one.close()
                self._abortable.clear()  # who waits for this rank hears of it when groups are gone
                leave_world()
            self._watchdog = None

    def _abort(self) -> None:
        threads = [  # the first may block until the others are aborted
            threading.Thread(target=_abort, args=(group,), name="gpipe-abort", daemon=True)
            for group in self._abortable
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._rendezvous.deadlines.grace_s)


def _abort(group: Any) -> None:
    with suppress(Exception):  # the run has failed already, for another reason
        group.abort()
