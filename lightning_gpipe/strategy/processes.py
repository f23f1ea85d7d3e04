"""The processes of a pipeline, as Lightning sees them: ranks, groups, collectives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.reason import Failure, Kind
from lightning_gpipe.failure.screen import LastWord
from lightning_gpipe.failure.watchdog import Watchdog
from lightning_gpipe.plan.settings import Settings, check_choice
from lightning_gpipe.strategy import _lightning
from lightning_gpipe.strategy.launcher import (
    MultiProcessingLauncher,
    ScriptLauncher,
    expecting_all,
    wait_for_children,
)
from lightning_gpipe.strategy.rendezvous import explain_connections, join_world, leave_world
from lightning_gpipe.strategy.signals import EndOnSigterm, Requeue

_T = TypeVar("_T")


class ReportFirst(Callback):
    """Tells all ranks of an exception before the user's callbacks take their time over it.

    Args:
        report: Tells them.
    """

    def __init__(self, report: Callable[[BaseException], object]) -> None:
        self._report = report

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._report(exception)


StartMethod = Literal["popen", "spawn", "fork"]


class PipelineProcesses(ParallelStrategy):
    """One process per stage and replica, launched by Lightning, connected by process groups.

    Args:
        settings: What the user chose.
        process_group_backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up.
        start_method: How processes start.
        options: Passed to ``ParallelStrategy``.
    """

    #: How long each side of a failure is waited for.
    deadlines = Deadlines()

    def __init__(
        self,
        settings: Settings,
        process_group_backend: str | None,
        timeout: timedelta,
        start_method: StartMethod,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("start_method", start_method, get_args(StartMethod))
        self.num_nodes = 1
        self._settings = settings
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._groups: Groups | None = None
        self._watchdog: Watchdog | None = None
        self._on_sigterm: EndOnSigterm | None = None
        self._requeue: Requeue | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The strategy has no devices yet: the Trainer sets them.")
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def stages(self) -> int:
        """K, the number of stages."""
        return self.num_processes if self._settings.stages == "auto" else self._settings.stages

    @property
    def chunks(self) -> int:
        """M, the number of micro-batches that a mini-batch is split into."""
        return 4 * self.stages if self._settings.chunks == "auto" else self._settings.chunks

    @property
    def replicas(self) -> int:
        """D, the number of pipelines."""
        return self.world_size // self.stages

    @property
    def stage(self) -> int:
        """The stage that this process runs."""
        return self.global_rank % self.stages

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last layers."""
        return self.stage == self.stages - 1

    @property
    def is_distributed(self) -> bool:
        """Whether data is shared out between replicas, in Lightning's sense of the word."""
        return self.replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.replicas, "rank": self.global_rank // self.stages}

    # ------------------------------------------------------------------ processes

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: the Trainer sets it.")
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                self.finish,
                self.deadlines,
            )
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        _lightning.reset_seed()
        self.set_world_ranks()
        self._check_world()
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment: the Trainer sets it.")
        node = self.node_rank * self.num_processes
        with expecting_all(node, self.deadlines.grace_s):
            try:
                self._meet(self.cluster_environment)
            except RuntimeError as error:
                raise (explain_connections(error) if self.num_nodes > 1 else error) from None
        self._make_handlers()

    def _meet(self, environment: ClusterEnvironment) -> None:
        """Make the process groups and the watchdog. Collective over the world."""
        device = self.root_device
        backend = self._process_group_backend or _lightning.default_backend(device)
        join_world(environment, backend, self._timeout, device)
        if self._watchdog is None and self.world_size > 1:
            self._watchdog = Watchdog(
                self.global_rank,
                self.stages,
                self.world_size,
                environment.main_address,
                self.broadcast,
                self._abort,
                device.type == "cpu",
                self.deadlines,
            )
        if self._groups is None:
            self._groups = Groups.connect(self.stages, backend, device, self._timeout)

    def _make_handlers(self) -> None:
        """Make what takes the place of Lightning's signal handlers, and hears of errors first."""
        callbacks = self._callbacks
        if not any(isinstance(callback, ReportFirst) for callback in callbacks):
            callbacks.insert(0, ReportFirst(self.report))
        pass_on = self.launcher.kill if self.launcher is not None else lambda _: None
        self._on_sigterm = EndOnSigterm(pass_on, lambda: self.is_interrupted)
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = Requeue(environment.requeue_signal or signal.SIGUSR1)

    def _take_signals(self) -> None:
        for handler in (self._on_sigterm, self._requeue):
            if handler is not None:
                handler.install()

    on_train_start = on_validation_start = on_test_start = on_predict_start = _take_signals

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Save and requeue between two steps, if SLURM has announced the end to any rank."""
        requeue = self._requeue
        if requeue is not None and self.reduce_boolean_decision(requeue.is_pending, all=False):
            requeue.run()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell every rank of an error, whatever it came from."""
        failure = self.report(exception)
        if failure is not None:
            wait = partial(wait_for_children, self.deadlines.grace_s)
            LastWord.install(exception, failure, self.global_rank, wait)
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM
        elif isinstance(exception, SystemExit) and not exception.code and self.world_size > 1:
            exception.code = 1  # the other ranks haven't ended well
        if isinstance(self.launcher, MultiProcessingLauncher) and self._groups is None:
            self.launcher.kill(signal.SIGTERM)  # in the process that only waits for the others
        super().on_exception(exception)

    def disconnect(self) -> None:
        """Leave the groups: with the others at the end of a run, at once after an error."""
        if self._groups is not None and not self.is_interrupted:
            self._groups.close()
        self._groups = None
        callbacks = self._callbacks
        callbacks[:] = [c for c in callbacks if not isinstance(c, ReportFirst)]
        if self.is_interrupted:
            self._leave()

    def finish(self) -> None:
        """Wait until all ranks are through with a run and its hooks. Collective over the world.

        Raises:
            RemoteError: If another rank has failed in one of its hooks.
        """
        failure = self._watchdog.finish() if self._watchdog is not None else None
        if failure is not None:
            raise RemoteError(str(failure))
        self._leave()

    def _leave(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            if self._watchdog.failure is not None:
                leave_world()
            self._watchdog = None

    @property
    def failure(self) -> Failure | None:
        """The first failure of the run, if it has failed."""
        return self._watchdog.failure if self._watchdog is not None else None

    def report(self, error: BaseException) -> Failure | None:
        """Tell all ranks that the run has failed.

        Returns:
            The first failure of the run; None if nobody can tell.
        """
        if self._watchdog is None:
            return None
        kind: Kind | None = "sigterm" if isinstance(error, SIGTERMException) else None
        return self._watchdog.report(error, kind)

    @property
    def _callbacks(self) -> list[Any]:
        """The Trainer's."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        return vars(trainer)["callbacks"] if trainer is not None else []  # it doesn't declare them

    @property
    def is_interrupted(self) -> bool:
        """Whether the run has failed, so that nobody can be waited for."""
        module = self.lightning_module
        return (
            module is not None
            and module._trainer is not None
            and module.trainer.state.status == TrainerStatus.INTERRUPTED
        )

    def _abort(self) -> None:
        def abort(group: Any) -> None:
            with suppress(Exception):  # the run has failed already, for another reason
                group.abort()

        groups: list[Any] = self._groups.all_groups if self._groups is not None else []
        threads = [  # the first may block until the others are aborted
            threading.Thread(target=abort, args=(group,), name="gpipe-abort", daemon=True)
            for group in (dist.group.WORLD, *groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.deadlines.grace_s)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's place."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (an untyped attribute)

    def _check_world(self) -> None:
        world, stages = self.world_size, self.stages
        if world % stages:
            raise ValueError(
                f"{world} processes can't be divided into pipelines of stages={stages}: choose"
                " devices x num_nodes as a multiple of stages, or stages='auto' for one pipeline"
                " per node."
            )

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes, unless the run has failed."""
        if not _lightning.distributed_is_initialized() or self.is_interrupted:
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Give all processes an object of one, unless the run has failed."""
        if not _lightning.distributed_is_initialized() or self.is_interrupted:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a value over the replicas; the stages of one have the same.

        Args:
            tensor: The value.
            group: Another group of processes.
            reduce_op: ``"mean"``, ``"sum"``, or a ``ReduceOp``.
        """
        if not isinstance(tensor, Tensor) or self._is_alone(group):
            return tensor
        return _lightning.reduce(tensor, self._over_replicas(group), reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a value from the replicas; the stages of one have the same.

        Returns:
            ``[replicas, …]``, or the tensor itself if there is one replica.
        """
        if self._is_alone(group):
            return tensor
        return _lightning.all_gather(tensor, self._over_replicas(group), sync_grads)

    def _is_alone(self, group: Any) -> bool:
        return self.replicas == 1 and group in (None, dist.group.WORLD)

    def _over_replicas(self, group: Any) -> Any:
        """What Lightning means by all processes: here, the replicas."""
        if group not in (None, dist.group.WORLD):
            return group
        return self._groups.siblings.data if self._groups is not None else None

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree on a decision over all processes, unless the run has failed."""
        if not _lightning.distributed_is_initialized() or self.is_interrupted:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)
