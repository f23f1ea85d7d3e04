"""The Lightning face of the pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_gpipe.gradients.data_parallel import DataParallelOptions
from lightning_gpipe.plan.cost import Balance
from lightning_gpipe.plan.settings import ScheduleName, Settings, StepMode
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.strategy import refusals
from lightning_gpipe.strategy.loggers import LoggedSettings
from lightning_gpipe.strategy.processes import StartMethod
from lightning_gpipe.strategy.run import Run
from lightning_gpipe.strategy.whole_model import WholeModelStrategy

DEFAULT_TIMEOUT = timedelta(minutes=30)


class GPipeStrategy(WholeModelStrategy):
    """Trains an unchanged LightningModule with its backbone cut into a pipeline of stages.

    The module's steps call an ``nn.Sequential``, or loop over a list of layers: the *backbone*.
    Its layers are cut into K stages, one process each. Every mini-batch is split into M
    micro-batches that flow through the stages; activations are re-materialized in the backward; the
    optimizer steps once per mini-batch. The backbone's output comes back on every stage, so the
    code around it, logging and callbacks run as on one device. The weights don't depend on K.
    (GPipe, Huang et al. 2019.)

    With more processes than stages there are D = processes / K replicas of the pipeline, which read
    different data and average their gradients, as with DDPStrategy.

    Args:
        chunks: M, the number of micro-batches of a mini-batch. ``"auto"``: 4 x stages, which keeps
            the bubble small, and more if only smaller ones fit in ``memory_limit``, or in the
            device's memory; but no more than there are samples, or than leave batch norm 4 at once.
        stages: K, the number of stages. ``"auto"``: the processes of one node.
        backbone: Dotted name of the ``nn.Sequential``, list or dict to cut. ``None``: find it.
        balance: How layers are shared out: by ``"flops"`` (operations of a training step,
            counted without computing them; frozen layers count what their backward computes), by
            ``"time"`` (measured on the device), by ``"params"``, by ``"memory"``, by an explicit
            list of layers per stage (per part, with several virtual stages), or by a function of a
            layer and its input (tensors on the meta device) that returns its cost.
        checkpoint: Which micro-batches are re-materialized: ``"always"`` all, ``"except_last"`` all
            but the last, whose backward comes first, ``"never"`` none; or how many, as a number
            (``3``) or a share (``0.5``). Those whose backward comes first keep their activations.
            ``"auto"``: as few as fit in ``memory_limit``, or in the device's memory.
        deferred_batch_norm: Whether running statistics of batch norm move once per mini-batch, as
            on one device, instead of once per micro-batch.
        virtual_stages: V, the number of parts of the backbone that each stage runs: layers are cut
            into V x K parts, and part v runs on stage v modulo K. It divides the time in which
            stages wait by V, where M is at least K, for V times the messages.
        step: What the module's steps are given. ``"mini-batch"``: every stage runs them over the
            whole mini-batch, so any loss is exact. ``"micro-batch"``: they run once for each
            micro-batch, and every part of them where its data is: what stands before the backbone
            on the first stage, what stands behind it on the last. The loss is the mean of the
            micro-batches' by their sizes, or by what the step returns as ``"weight"`` beside
            ``"loss"``.
        schedule: In which order a stage works with ``step="micro-batch"``: ``"fill_drain"`` all
            forwards, then all backwards; ``"1f1b"``, or ``"interleaved"`` with several virtual
            stages, a forward and a backward in turn; ``"searched"`` what takes the shortest time.
            ``"auto"``: searched. The numbers don't depend on it.
        save_distributed_checkpoint: Whether every process writes its part of a checkpoint, which is
            a folder then, as for ``ModelParallelStrategy``. Else the first one writes a file. Both
            are loaded with any other number of stages and replicas.
        shard_optimizer_state: Whether the D replicas of a stage share out its optimizer state: each
            keeps that of a D-th of the parameters, as far as whole ones can be shared out evenly,
            steps these, and sends the others the new values. The numbers and checkpoints are the
            same. Every replica must step the same optimizers, which work parameter by parameter.
        memory_limit: What a stage may be expected to hold: a number of bytes, ``"16GB"`` or
            ``"16GiB"``. Layers are shared out within it, and a cut beyond it is refused before
            training starts. ``None``: no limit.
        process_group_backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up; by default 30 minutes.
        start_method: How processes start: ``"popen"``, the script runs once for each, ``"spawn"``
            or ``"fork"``, as in ``multiprocessing``; ``"auto"``: in notebooks fork, else popen.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are averaged over replicas, as
            for ``DistributedDataParallel``, and so the next two.
        gradient_as_bucket_view: Whether gradients live in the buckets.
        broadcast_buffers: Whether all replicas take over the first one's buffers, such as
            batch-norm statistics, after every step, and before the next what hooks have changed.
        ddp_comm_hook: Communicates the gradients of the backbone over the replicas, and so the next
            two, as for ``DDPStrategy``.
        ddp_comm_state: The hook's state; ``None``: the process group of the replicas.
        ddp_comm_wrapper: Wraps the hook.
        accelerator: As for every Lightning strategy; the Trainer sets it, and the four below.
        parallel_devices: The devices of this node.
        cluster_environment: Ranks and addresses.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision.
    """

    strategy_name = "gpipe"

    def __init__(
        self,
        chunks: int | Literal["auto"] = "auto",
        *,
        stages: int | Literal["auto"] = "auto",
        backbone: str | None = None,
        balance: Balance = "flops",
        checkpoint: Checkpoint | Literal["auto"] = "except_last",
        deferred_batch_norm: bool = True,
        virtual_stages: int = 1,
        step: StepMode = "mini-batch",
        schedule: ScheduleName = "auto",
        save_distributed_checkpoint: bool = False,
        shard_optimizer_state: bool = False,
        memory_limit: int | str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: StartMethod = "auto",
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            Settings(
                chunks,
                stages,
                backbone,
                balance,
                checkpoint,
                deferred_batch_norm,
                virtual_stages,
                step,
                schedule,
                save_distributed_checkpoint,
                shard_optimizer_state,
                memory_limit,
            ),
            process_group_backend,
            timeout,
            start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options = DataParallelOptions(
            bucket_cap_mb,
            gradient_as_bucket_view,
            broadcast_buffers,
            ddp_comm_hook,
            ddp_comm_state,
            ddp_comm_wrapper,
        )
        refusals.refuse_options(self._options, self._settings)
        self._logged = LoggedSettings()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy; in a run the strategy itself, whose processes are there once."""
        if self._world is not None:
            return self
        made = memo[id(self)] = copy.copy(self)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        trainer.accelerator.setup(trainer)
        refusals.refuse(trainer, self._layer_sync, self._layout, self.without_sync, self._settings)
        if trainer.state.fn == TrainerFn.FITTING:
            refusals.refuse_unknown_memory(self._settings, self.root_device)
        self.model = self.precision_plugin.convert_module(self._module)
        self._run = Run(
            trainer,
            self._connected,
            self._settings,
            self.chunks,
            self._options,
            [self._device_of(rank) for rank in self._connected.groups.ranks],
            self._layer_sync,
            self._logged,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self._run.adopt_optimizers(self.optimizers)
        self.setup_precision_plugin()

    @override
    def teardown(self) -> None:
        run, self._run = self._run, None
        try:
            if run is not None:
                self._partition = run.pipeline.partition
                self._parts = run.close()
        finally:
            super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.train(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate(super().validation_step, "validation", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate(super().test_step, "test", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.evaluate(super().predict_step, "prediction", *args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.pre_backward(closure_loss)
        plugin, module, given = self.precision_plugin, self._module, closure_loss
        closure_loss = plugin.pre_backward(closure_loss, module)
        if not self._running.differentiates:
            with self._running.backward(closure_loss, bool(kwargs.get("retain_graph"))) as loss:
                if loss is not closure_loss and module.automatic_optimization:
                    # the last stage differentiates it: here its graph would only take memory
                    given.detach_()
                    closure_loss.detach_()
                plugin.backward(loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._running.accumulating()
