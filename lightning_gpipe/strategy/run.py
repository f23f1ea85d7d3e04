"""One run of the Trainer: the module as a pipeline, and all that is put back at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from types import NoneType
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.stopwatch import Stopwatch
from lightning_gpipe.gradients.data_parallel import DataParallelOptions
from lightning_gpipe.gradients.norm import gradient_norm, scale_to_norm
from lightning_gpipe.model.layer_state import generators_of
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.refused import noted, told_of
from lightning_gpipe.model.step_errors import explained
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.pipeline.pipeline import Parts, Surroundings
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.state.averages import AveragedCopy
from lightning_gpipe.state.placement import Owners
from lightning_gpipe.strategy import (
    _lightning,
    callbacks,
    functional_calls,
    logged_alike,
    metrics,
    monitor,
    optimizer_refusals,
    outside_gradients,
    patches,
    precision,
    saving,
    step_draws,
)
from lightning_gpipe.strategy.batch_size import searched_over_stages
from lightning_gpipe.strategy.checkpoint_io import removed_after_saving
from lightning_gpipe.strategy.loggers import LoggedSettings
from lightning_gpipe.strategy.micro_batches import MicroBatchSteps
from lightning_gpipe.strategy.optimizer_states import OptimizerStates, complete
from lightning_gpipe.strategy.places import PlacedStrategy
from lightning_gpipe.strategy.reader import hooks_see_replicas
from lightning_gpipe.strategy.skipping import agreed
from lightning_gpipe.strategy.world import World

_GENERATORS = 64  # of the user's own, of which more would take long to share
#: Whether a backward runs that all stages know of, of a run in a hook of another one, perhaps.
_IS_STEERED: ContextVar[bool] = ContextVar("is_steered", default=False)


class Run:
    """A module's run as a pipeline: from ``Strategy.setup`` to ``Strategy.teardown``.

    Args:
        trainer: The Trainer, whose strategy has set up the processes.
        world: The processes.
        settings: What the user chose.
        chunks: M.
        options: How replicas communicate.
        devices: The device of every stage.
        layer_sync: The Trainer's plugin that synchronizes batch norm; None: it isn't wanted.
        logged: What loggers know of pipelines.

    Raises:
        ValueError: If something can't work in a pipeline, with what to do instead.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        world: World,
        settings: Settings,
        chunks: int,
        options: DataParallelOptions,
        devices: Sequence[torch.device],
        layer_sync: Any,
        logged: LoggedSettings,
    ) -> None:
        self._trainer, self._world, self._settings, self._logged = trainer, world, settings, logged
        self._evaluations, self._accumulating = 0, False
        self._averages: list[AveragedCopy] = []
        self._is_set_up, self._trial = False, world.trial
        fitting = trainer.state.fn == TrainerFn.FITTING
        with ExitStack() as undo:
            undo.enter_context(
                _synchronized_batch_norm(trainer.lightning_module, layer_sync, world.groups)
            )
            surroundings = Surroundings(
                settings,
                chunks,
                world.groups,
                options,
                devices=[str(device) for device in devices],
                optimizers=self._optimizers if fitting else list,
                is_fitting=fitting,
                on_cut=self._cut,
                on_settled=self._settled,
                inform=logged.print,
                warn=rank_zero_warn,
                trial=self._trial,
                watch=(watch := Stopwatch(world.groups.device)),
            )
            self.pipeline = PipelinedModule(trainer.lightning_module, surroundings)
            self.optimizer_states = OptimizerStates(self.pipeline)
            undo.callback(lambda: self.pipeline.close(self._can_restore()))
            self._averages = undo.enter_context(
                callbacks.adapted(
                    vars(trainer)["callbacks"],  # it doesn't declare them
                    self.pipeline,
                    world.groups,
                    self.can_gather,
                    lambda: world.has_saved,
                    averages=trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING),
                    is_sharded=settings.save_distributed_checkpoint,
                )
            )
            undo.callback(self._close_averages)
            undo.enter_context(noted())
            undo.enter_context(monitor.attached(trainer, watch, self.pipeline, world, settings))
            self.pipeline.to_device()
            undo.enter_context(
                precision.over_stages(
                    trainer.precision_plugin,
                    trainer.lightning_module,
                    self.pipeline.gradients,
                    world.groups,
                )
            )
            undo.enter_context(metrics.over_replicas(world.groups))
            if world.groups.stages == 1 and settings.step == "mini-batch":
                steered = partial(_backward_alone, self, torch.autograd.backward)
                undo.enter_context(patches.AUTOGRAD_BACKWARD.replaced(steered))
            undo.enter_context(outside_gradients.allowed(self.pipeline))
            undo.enter_context(patches.hooks_counted())
            undo.enter_context(hooks_see_replicas(world.groups))
            undo.enter_context(functional_calls.refused(self.pipeline))
            undo.enter_context(searched_over_stages(trainer, self._trial))
            undo.enter_context(patches.SIGTERM_BROADCAST.replaced(_end_on_sigterm))
            undo.enter_context(patches.TRAINING_STEP.replaced(_lightning.step_with_output))
            self._logs = undo.enter_context(logged_alike.attached(self.pipeline, settings.step))
            self._steps = None
            if settings.step == "micro-batch":
                self._steps = undo.enter_context(_stepping(trainer, self.pipeline))
            undo.enter_context(removed_after_saving(trainer.strategy.checkpoint_io))
            own = partial(_generators, trainer, self.pipeline.backbone)
            undo.enter_context(world.generators.with_own(own))
            self._is_set_up = True
            self._undo = undo.pop_all()

    def adopt_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers hold the state that this rank keeps alone, or say what to do instead."""
        if self._world.is_spread:
            optimizer_refusals.refuse_optimizers(optimizers)
            optimizer_refusals.refuse_unlike(optimizers, self._world.groups.pipeline)
        if self._settings.shard_optimizer_state and self._world.groups.replicas > 1:
            optimizer_refusals.refuse_to_shard(optimizers)
        complete(optimizers)
        self._undo.enter_context(step_draws.refused(optimizers, self._world.groups))
        self.optimizer_states.adopt(optimizers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the Trainer, which is outside of the run."""
        return NoneType, ()

    def close(self) -> Parts | None:
        """Give the module back; returns what each rank goes on holding, if it doesn't get all."""
        with self._world.guarded():
            if self._can_restore():
                self.pipeline.cut_unbuilt()
        parts = self.pipeline.parts
        with self._world.guarded():
            self._undo.close()
        # they know this object and the groups
        del self.pipeline, self.optimizer_states, self._logs, self._steps
        return parts

    def can_gather(self) -> bool:
        """Whether the processes that hold parts of what is saved can be waited for."""
        return not self._world.is_spread or self._world.can_wait()

    def _optimizers(self) -> list[Optimizer]:
        """The optimizers that have parameters: Lightning's stand-in for none has no state."""
        optimizers = self._trainer.strategy.optimizers
        return [found for found in optimizers if not isinstance(found, _lightning.MockOptimizer)]

    def _close_averages(self) -> None:
        for average in self._averages:
            average.close(self._can_restore())

    def _can_restore(self) -> bool:
        return self._is_set_up and self.can_gather()

    def _cut(self, partition: Partition) -> None:
        for average in self._averages:
            average.cut(partition)
        groups, trainer = self._world.groups, self._trainer
        cast(PlacedStrategy, trainer.strategy).settle_chunks(self.pipeline.chunks)
        self.optimizer_states.load_waiting()
        if self._world.rank == 0 and trainer.enable_autolog_hparams:
            how = saving.record(self.pipeline.chunks, groups.stages, groups.replicas, partition)
            how |= {"backbone": self.pipeline.backbone, **self._settings.for_loggers()}
            self._logged.tell(trainer.loggers, how)

    def _settled(self, owners: Owners) -> None:
        for average in self._averages:
            average.settle(owners, self.pipeline.backbone)

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the user's training step. Collective over the pipeline."""
        number = self._trainer.fit_loop.epoch_loop.total_batch_idx
        self.pipeline.begin_step(0, number, training=True)
        if self._steps is not None:
            step = partial(self._steps.train, step, number, not self._accumulating)
        else:
            step = agreed(step, self._trainer, self._world.groups)
        result = self._step(step, *args, **kwargs)
        if _lightning.has_no_backward(self._trainer):
            self.pipeline.end_step()
        return result

    def evaluate(self, step: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step of validation, test or prediction. Collective over the pipeline."""
        if self._world.groups.replicas == 1:  # several may have different numbers of batches
            self._world.heed_signals(self._trainer)
        self._evaluations += 1
        self.pipeline.begin_step(1, self._evaluations)
        if self._steps is not None:
            step = partial(self._steps.evaluate, step, kind)
        return self._step(step, *args, **kwargs)

    @property
    def differentiates(self) -> bool:
        """Whether the steps have run their backwards when they return."""
        return self._steps is not None

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # where a step has read its last batch, Lightning ends the epoch, on every rank
        spared = () if self.differentiates else (StopIteration,)
        with (
            self._world.guarded(*spared),
            self._trial.shared(),
            told_of(),
            explained(self._trainer.lightning_module),
        ):
            self._world.generators.share()
            result = step(*args, **kwargs)
        return result

    @contextmanager
    def backward(self, loss: Tensor, retain: bool) -> Generator[Tensor, None, None]:
        """Run a backward inside this context. Collective over the pipeline.

        Args:
            loss: The user's loss, the same on every stage.
            retain: Whether its graph is needed once more.

        Yields:
            The loss to differentiate on this stage.
        """
        token = _IS_STEERED.set(True)
        try:
            with (
                self._world.guarded(),
                self.pipeline.backward(loss, retain, not self._accumulating) as own,
                self._logs.compared(),
            ):
                yield own
        finally:
            _IS_STEERED.reset(token)

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Leave gradients outside the backbone unsummed, to accumulate them first."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """See :meth:`GPipeStrategy.grad_norm`. Collective over the pipeline."""
        return gradient_norm(parameters, self.pipeline.gradients(), self._world.groups, norm_type)

    def clip(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, only_finite: bool
    ) -> Tensor:
        """See :meth:`GPipeStrategy.clip_grad_norm_`. Collective over the pipeline."""
        total = self.grad_norm(parameters, norm_type)
        scale_to_norm(parameters, total, max_norm, only_finite)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole on rank 0, or each rank's part, to save. Collective."""
        return self.pipeline.state_dict(is_alone=not self.can_gather())

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, in the same way. Collective."""
        if not self.can_gather():
            return optimizer.state_dict()
        return self.optimizer_states.state_dict(optimizer)


@contextmanager
def _stepping(
    trainer: pl.Trainer, pipeline: PipelinedModule
) -> Generator[MicroBatchSteps, None, None]:
    """Let the Trainer's steps run once per micro-batch."""
    steps = MicroBatchSteps(trainer, pipeline)
    log = patches.as_method(partial(steps.log, patches.LOG.current()))
    closure = patches.as_method(partial(_zeroing_first, patches.CLOSURE.current()))
    with (
        patches.LOG.replaced(log),
        patches.CLOSURE.replaced(closure),
        steps.metrics.attached(),
    ):
        yield steps


def _zeroing_first(
    make_closure: Callable[..., Closure], loop: Any, *args: Any, **kwargs: Any
) -> Closure:
    """A closure that zeroes the gradients before the training step, not after it."""
    closure = make_closure(loop, *args, **kwargs)
    zero_grad, step = closure._zero_grad_fn, closure._step_fn

    def zero_and_step() -> ClosureResult:
        if zero_grad is not None:
            zero_grad()
        return step()

    return Closure(zero_and_step, closure._backward_fn, None)


def _backward_alone(
    run: Run,
    backward: Callable[..., None],
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run a backward that the user has called by himself, where there is one stage."""
    call = partial(backward, tensors, grad_tensors, retain_graph, *args, **kwargs)
    if _IS_STEERED.get():
        call()
        return
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    loss = torch.stack([tensor.sum() for tensor in listed]).sum()  # leads to the same graph
    with run.backward(loss, bool(retain_graph)):
        call()


def _end_on_sigterm(loop: Any) -> None:
    """End before a batch, if a handler of the user's has noted a SIGTERM."""
    if loop.trainer.received_sigterm:
        raise SIGTERMException


@contextmanager
def _synchronized_batch_norm(
    module: nn.Module, layer_sync: Any, groups: Groups
) -> Generator[None, None, None]:
    """Put SyncBatchNorm in where it is wanted, over the replicas.

    Args:
        module: The user's module.
        layer_sync: The Trainer's plugin; None: it isn't wanted.
        groups: The process groups.
    """
    with ExitStack() as undo:
        if groups.replicas > 1 and layer_sync is not None:
            layer_sync.apply(module)
            undo.callback(layer_sync.revert, module)
        for part in module.modules():
            if groups.replicas > 1 and isinstance(part, nn.SyncBatchNorm):
                part.process_group = groups.siblings.data
        yield


def _generators(trainer: pl.Trainer, backbone: str) -> dict[Any, Any]:
    """The random generators that the user's code outside the backbone holds."""
    module = trainer.lightning_module
    others = [getattr(trainer, "datamodule", None), *vars(trainer)["callbacks"]]
    beside = {f"{type(other).__name__} {i}": other for i, other in enumerate(others)}
    found = generators_of(module, module.get_submodule(backbone), beside)
    return dict(islice(found.items(), _GENERATORS))
