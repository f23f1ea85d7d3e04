"""The processes of a pipeline, as Lightning sees them: places, start and end, collectives."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.failure.deadlines import Deadlines
from lightning_gpipe.failure.reason import Failure
from lightning_gpipe.model.parameters import materialize
from lightning_gpipe.plan.settings import Settings, check_choice
from lightning_gpipe.strategy import (
    _lightning,
    advice,
    building,
    callbacks,
    collectives,
    optimizer_refusals,
    refusals,
)
from lightning_gpipe.strategy.checkpoint_io import refuse_for_parts, with_whole_files
from lightning_gpipe.strategy.launcher import MultiProcessingLauncher, ScriptLauncher
from lightning_gpipe.strategy.loader import PipelineLoader
from lightning_gpipe.strategy.places import PlacedStrategy
from lightning_gpipe.strategy.rendezvous import check_meeting
from lightning_gpipe.strategy.world import Rendezvous, World, check_division

_T = TypeVar("_T")
_LONGEST_TIMEOUT = timedelta(days=36500)  # clocks count nanoseconds in 64 bits
StartMethod = Literal["auto", "popen", "spawn", "fork"]


def _chosen(start_method: StartMethod) -> Literal["popen", "spawn", "fork"]:
    if start_method == "auto":  # a notebook is no script, to be run once per process
        return "fork" if _lightning.IS_INTERACTIVE else "popen"
    return start_method


class ProcessesStrategy(PlacedStrategy):
    """A process per stage and replica, started by Lightning, connected for the length of a run.

    Args:
        settings: What the user chose.
        process_group_backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up.
        start_method: How processes start; "auto": as they can here.
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
        super().__init__(settings, **options)
        check_choice("start_method", start_method, get_args(StartMethod))
        _check(process_group_backend, timeout)
        self._backend, self._timeout = process_group_backend, timeout
        self._start_method = _chosen(start_method)
        self._is_explained = False
        self._world: World | None = None  # from setup_environment to teardown
        self._left: World | None = None  # after that, until all ranks are through

    @override
    def _configure_launcher(self) -> None:
        processes = self.num_processes * self.num_nodes
        check_division(processes, self.stages)  # before any starts
        check_meeting(self._environment, self.num_nodes, self._backend, self.root_device)
        if processes == 1:
            return  # this one is the whole world
        if _lightning.IS_INTERACTIVE and self._start_method != "fork":
            advice.refuse_notebook(self._start_method)
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self._environment,
                self.num_processes,
                self.num_nodes,
                self.finish,
                self.deadlines,
            )
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # in host memory: a device need not hold the whole model, and the cut moves a stage's part
        with _lightning.EmptyInit(bool(empty_init)), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        plugin, module = self.precision_plugin, self._module
        with building.lazily(module, plugin.module_init_context, self.root_device):
            yield

    @override
    def setup_environment(self) -> None:
        if self._settings.save_distributed_checkpoint:
            refuse_for_parts(self._checkpoint_io)
        self._checkpoint_io = with_whole_files(self._checkpoint_io)
        super().setup_environment()
        self.set_world_ranks()
        self._world = World(
            self._layout,
            Rendezvous(
                self._environment,
                self.root_device,
                self._backend,
                self._timeout,
                self.deadlines,
                self.num_processes,
                self.num_nodes,
            ),
            lambda: self.is_interrupted,
            self.launcher.kill if self.launcher is not None else lambda _: None,
        )
        if self.world_size == 1 and self._settings.stages == "auto" and not self._is_explained:
            self._is_explained = True
            advice.explain_one_stage()
        if self.world_size > 1:
            callbacks.report_first(self._callbacks, self._world.report)
        if callbacks.copies_module(self._callbacks):
            if self.global_rank == 0:
                refusals.refuse_copies_of_nothing(self._module)
            materialize(self._module)  # what an earlier run left on meta can't be copied

    def _take_signals(self) -> None:
        self._connected.take_signals(self._callbacks)

    on_train_start = on_validation_start = on_test_start = on_predict_start = _take_signals

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._heed_signals()

    def _heed_signals(self) -> None:
        self._connected.heed_signals(self._module.trainer)

    on_train_end = on_validation_end = on_test_end = on_predict_end = _heed_signals

    @override
    def on_exception(self, exception: BaseException) -> None:
        watched = self._world or self._left
        failure = watched.report(exception) if watched is not None else None
        if watched is not None and failure is not None:
            watched.prepare_last_word(exception, failure)
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM
        elif isinstance(exception, SystemExit) and not exception.code and self.world_size > 1:
            exception.code = 1  # the other ranks haven't ended well
        if watched is None and isinstance(self.launcher, MultiProcessingLauncher):
            self.launcher.kill(signal.SIGTERM)  # in the process that only waits for the others
        super().on_exception(exception)

    def finish(self) -> None:
        """Wait until all ranks are through with a run and its hooks. Collective over the world."""
        if self._left is not None:
            self._left.finish()
            self._left = None

    @property
    def failure(self) -> Failure | None:
        """The first failure of the run, if it has failed."""
        watched = self._world or self._left
        return watched.failure if watched is not None else None

    @property
    def is_interrupted(self) -> bool:
        """Whether the run has failed, so that nobody can be waited for."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _has_saved(self) -> bool:
        """Whether the run was interrupted after all ranks had saved."""
        watched = self._world or self._left
        return watched is not None and watched.has_saved

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == "run-stage":  # Lightning has its handlers installed, and loads data next
            self._connected.take_signals()
        if not self.is_interrupted:
            collectives.barrier(self.root_device)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        return obj if self.is_interrupted else collectives.broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        can_wait = not self.is_interrupted
        return collectives.agree(decision, self.root_device, all) if can_wait else decision

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return collectives.reduce(tensor, self._over_replicas(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return collectives.all_gather(tensor, self._over_replicas(group), sync_grads)

    def _over_replicas(self, group: Any) -> Any:
        """What Lightning means by all processes: the replicas; None: there is one."""
        if group not in (None, dist.group.WORLD):
            return group
        if self.replicas == 1:
            return None
        return self._world.groups.siblings.data if self._world is not None else dist.group.WORLD

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        explained: AbstractContextManager[None] = nullcontext()
        if self._connected.is_spread:
            closure = optimizer_refusals.called_once(closure, optimizer)
            explained = optimizer_refusals.explained(optimizer)
        with explained, self._connected.trial.shared():  # a first step takes memory, too
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def process_dataloader(self, dataloader: Any) -> object:
        if self._world is None:
            return dataloader
        refusals.refuse_sampler(dataloader, self.replicas, self._layout.replica)
        if self.stages == 1:
            return dataloader
        _lightning.seed_workers(dataloader, self._layout.replica)  # not by the process
        layout, settings = self._layout, self._settings
        return PipelineLoader(dataloader, lambda: self._connected.generators, layout, settings)

    @override
    def model_to_device(self) -> None:
        """Do nothing: a run moves what its stage holds."""

    @override
    def teardown(self) -> None:
        connected, self._world = self._world, None
        left = connected or self._left
        self._left = left if not self.is_interrupted and self.world_size > 1 else None
        with ExitStack() as undo:  # all of it, whatever fails
            if connected is not None:
                undo.callback(connected.leave_own_group)
            for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
                if part is not None:
                    undo.callback(part.teardown)
            undo.callback(self._end_saving)
            callbacks.forget_reports(self._callbacks)
            if left is not None and (left is connected or self.is_interrupted):
                left.close()
        launcher = self.launcher
        if isinstance(launcher, ScriptLauncher) and not launcher.is_running:
            self.finish()  # a Tuner has left the run: nobody else does it

    def _end_saving(self) -> None:
        try:
            self.checkpoint_io.teardown()
        except BaseException:  # in the background: the run has failed first
            if not (self.is_interrupted and self._settings.save_distributed_checkpoint):
                raise

    @property
    def _connected(self) -> World:
        if self._world is not None:
            return self._world
        raise RuntimeError("The processes aren't connected: use the strategy in a Trainer.")

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no module: use it through a Trainer.")
        return self.lightning_module

    @property
    def _callbacks(self) -> list[Any]:
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return vars(trainer)["callbacks"] if trainer is not None else []  # it doesn't declare them


def _check(backend: object, timeout: object) -> None:
    """Refuse what isn't of the right kind."""
    if not isinstance(timeout, timedelta) or not timedelta() < timeout <= _LONGEST_TIMEOUT:
        raise ValueError(
            "timeout must be a datetime.timedelta above zero, such as timedelta(minutes=30), and at"
            f" most {_LONGEST_TIMEOUT.days} days, got timeout={timeout!r}."
        )
    if not (backend is None or (isinstance(backend, str) and backend)):
        raise ValueError(
            "process_group_backend must be None or a backend's name, such as 'gloo', got"
            f" process_group_backend={backend!r}."
        )
