"""The Lightning face of the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.gradients.data_parallel import DataParallelOptions
from lightning_gpipe.gradients.norm import gradient_norm, scale_to_norm
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.pipeline.pipeline import Surroundings
from lightning_gpipe.plan.cost import Balance
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.actions import Checkpoint
from lightning_gpipe.state.averages import AveragedCopy
from lightning_gpipe.strategy import callbacks, metrics, refusals
from lightning_gpipe.strategy import checkpoint_io as files
from lightning_gpipe.strategy.loader import PipelineLoader
from lightning_gpipe.strategy.precision import PipelinePrecision, one_stage_norms_refused
from lightning_gpipe.strategy.processes import StartMethod
from lightning_gpipe.strategy.saving import PipelineState

DEFAULT_TIMEOUT = timedelta(minutes=30)


class GPipeStrategy(PipelineState):
    """Trains an unchanged LightningModule with its backbone cut into a pipeline of stages.

    The module's steps call an ``nn.Sequential``, the *backbone*. Its layers are cut into K stages,
    one process each. Every mini-batch is split into M micro-batches that flow through the stages;
    activations are re-materialized in the backward; the optimizer steps once per mini-batch. The
    backbone's output comes back on every stage, so the code around it, logging and callbacks run as
    on one device. The weights don't depend on K. (GPipe, Huang et al. 2019.)

    With more processes than stages there are D = processes / K replicas of the pipeline, which read
    different data and average their gradients, as with DDPStrategy.

    Args:
        chunks: M, the number of micro-batches of a mini-batch. ``"auto"``: 4 x stages, which keeps
            the bubble small.
        stages: K, the number of stages. ``"auto"``: the processes of one node.
        backbone: Dotted name of the ``nn.Sequential`` to cut. ``None``: find it.
        balance: How layers are shared out: by ``"flops"`` (operations of a training step,
            counted without computing them; frozen layers count what their backward computes), by
            ``"params"``, by an explicit list of layers per stage, or by a function of a layer and
            its input (tensors on the meta device) that returns its cost.
        checkpoint: Which micro-batches are re-materialized: ``"always"`` all, ``"except_last"`` all
            but the last, whose backward comes first, ``"never"`` none.
        deferred_batch_norm: Whether running statistics of batch norm move once per mini-batch, as
            on one device, instead of once per micro-batch.
        process_group_backend: Backend for the tensors; ``None``: NCCL on GPUs, gloo on CPUs.
        timeout: How long a process waits for another before it gives up.
        start_method: How processes start. ``"popen"``: the script runs once per process;
            ``"spawn"`` and ``"fork"`` (for notebooks) as in ``multiprocessing``.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are averaged over replicas, as
            for ``DistributedDataParallel``, and so the next two.
        gradient_as_bucket_view: Whether gradients live in the buckets.
        broadcast_buffers: Whether all replicas take over the first one's floating-point buffers,
            such as batch-norm statistics, after every step.
        ddp_comm_hook: Communicates the gradients of the backbone over the replicas, and so the next
            two, as for ``DDPStrategy``.
        ddp_comm_state: The hook's state; ``None``: the process group of the replicas.
        ddp_comm_wrapper: Wraps the hook.
        accelerator: As for every Lightning strategy; the Trainer sets it, and the four below.
        parallel_devices: The devices of this node.
        cluster_environment: Ranks and addresses.
        checkpoint_io: How checkpoints are read and written.
        precision_plugin: The precision.

    Raises:
        ValueError: If an argument is none of the above.
    """

    strategy_name = "gpipe"
    #: Types of devices for which PyTorch has no SyncBatchNorm.
    without_sync: ClassVar = frozenset({"cpu"})

    def __init__(
        self,
        chunks: int | Literal["auto"] = "auto",
        *,
        stages: int | Literal["auto"] = "auto",
        backbone: str | None = None,
        balance: Balance = "flops",
        checkpoint: Checkpoint = "except_last",
        deferred_batch_norm: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
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
            Settings(chunks, stages, backbone, balance, checkpoint, deferred_batch_norm),
            process_group_backend,
            timeout,
            start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._data_parallel_options = DataParallelOptions(
            bucket_cap_mb,
            gradient_as_bucket_view,
            broadcast_buffers,
            ddp_comm_hook,
            ddp_comm_state,
            ddp_comm_wrapper,
        )
        self._precision: PipelinePrecision | None = None
        self._averages: list[AveragedCopy] = []
        self._logged: list[tuple[Any, dict[str, Any]]] = []  # what loggers know already
        self._run = ExitStack()  # what the end of a run undoes
        self._evaluations = 0
        self._accumulating = False

    def __repr__(self) -> str:
        chosen = (
            f"GPipeStrategy(chunks={self._settings.chunks!r}, stages={self._settings.stages!r})"
        )
        if "pytorch_lightning" not in sys.modules:
            return chosen
        return f"{chosen}, which is for lightning.Trainer, not for pytorch_lightning.Trainer"

    # ------------------------------------------------------------------ the module

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is None or self.lightning_module is None or self._groups is None:
            raise RuntimeError(
                "The strategy was set up before its processes: use it through a Trainer."
            )
        self.accelerator.setup(trainer)
        refusals.refuse_synchronized(
            self.lightning_module,
            self._layer_sync,
            self.root_device,
            self.replicas,
            self.without_sync,
        )
        refusals.refuse_precision(self.precision_plugin)
        refusals.refuse_logging(self.lightning_module, trainer.loggers)
        refusals.refuse_callbacks(self._callbacks)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self.replicas > 1:
            self._synchronize_batch_norm(self.lightning_module, self._groups.siblings.data)
        fitting = trainer.state.fn == TrainerFn.FITTING
        surroundings = Surroundings(
            self._settings,
            self.chunks,
            self._groups,
            self._data_parallel_options,
            devices=[str(self._device_of(rank)) for rank in self._groups.ranks],
            optimizers=lambda: self.optimizers if fitting else [],
            on_cut=self._on_cut,
            inform=rank_zero_info,
            warn=rank_zero_warn,
        )
        self._pipeline = PipelinedModule(self.lightning_module, surroundings)
        self._averages = self._run.enter_context(
            callbacks.adapted(
                self._callbacks,
                self._pipeline,
                self._groups,
                self._can_gather,
                averages=trainer.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING),
            )
        )
        self.model_to_device()
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            refusals.refuse_optimizers(self.optimizers)
            self._pipeline.adopt_optimizers()
        self.setup_precision_plugin()
        self._precision = PipelinePrecision(
            self.precision_plugin, self._pipeline.owner, self._groups
        )
        self._run.enter_context(metrics.over_replicas(self._groups))
        self._run.enter_context(one_stage_norms_refused())

    def _synchronize_batch_norm(self, module: nn.Module, group: Any) -> None:
        """Put SyncBatchNorm in where it is wanted, over the replicas."""
        if self._layer_sync is not None and self.replicas > 1:
            self._layer_sync.apply(module)
            self._run.callback(self._layer_sync.revert, module)
        for part in module.modules():
            if isinstance(part, nn.SyncBatchNorm):
                part.process_group = group

    def _on_cut(self, partition: Partition) -> None:
        """Cut what callbacks have copied, and let loggers know what is trained how."""
        for average in self._averages:
            average.cut(partition)
        trainer = self._trainer()
        if not self.is_global_zero or not trainer.enable_autolog_hparams:
            return
        settings = {
            **files.record(self.chunks, self.stages, self.replicas, partition),
            "backbone": self._active_pipeline().backbone,
            **self._settings.for_loggers(),
        }
        for logger in trainer.loggers:
            if any(found is logger and told == settings for found, told in self._logged):
                continue  # it's a test after a fit, perhaps
            self._logged.append((logger, settings))
            known = getattr(logger, "hparams", {})  # TensorBoard shows what it gets last
            try:
                logger.log_hyperparams({**known, "gpipe": settings})
            except Exception as error:  # MLflow's can't be changed within a run
                rank_zero_warn(
                    f"{type(logger).__name__} did not take the settings of the pipeline: {error}"
                )

    @override
    def model_to_device(self) -> None:
        if self._pipeline is not None:
            self._pipeline.to_device()

    def _device_of(self, rank: int) -> torch.device:
        devices = self.parallel_devices or []
        return devices[rank % len(devices)]

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._active_pipeline().begin_step(0, self._trainer().fit_loop.epoch_loop.total_batch_idx)
        with self._guarded():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation()
        with self._guarded():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation()
        with self._guarded():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation()
        with self._guarded():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _guarded(self) -> Generator[None, None, None]:
        """Tell every rank of an error at once, and say where it began and what it means here."""
        try:
            yield
        except Exception as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from (None if isinstance(explained, RemoteError) else error)

    def _explained(self, error: Exception) -> Exception:
        first = self.report(error)
        if first is None or first.rank == self.global_rank or first.text in str(error):
            return error
        return RemoteError(str(first))

    def _begin_evaluation(self) -> None:
        self._evaluations += 1
        self._active_pipeline().begin_step(1, self._evaluations)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward of a step. Collective over the pipeline.

        Args:
            closure_loss: The user's loss, the same on every stage.
            optimizer: The optimizer that will step, if it is known.
            args: Passed to ``LightningModule.backward``.
            kwargs: The same.
        """
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no module: use it through a Trainer.")
        pipeline, plugin = self._active_pipeline(), self.precision_plugin
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, self.lightning_module)
        with (
            self._guarded(),
            pipeline.backward(
                closure_loss, bool(kwargs.get("retain_graph")), not self._accumulating
            ) as loss,
        ):
            plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients outside the backbone unsummed, to accumulate them first."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @override
    def process_dataloader(self, dataloader: Any) -> object:
        """Let the first stage read the data for all."""
        if self._groups is None:
            return dataloader
        refusals.refuse_sampler(dataloader, self.replicas, self._groups.replica)
        if self.stages == 1:
            return dataloader
        return PipelineLoader(dataloader, self._groups.pipeline)

    # ------------------------------------------------------------------ gradients

    def grad_norm(self, parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients over all stages. Collective over the pipeline.

        Args:
            parameters: Those of the whole model or a part of it, as ``module.parameters()`` gives
                them, the same on every stage.
            norm_type: p of the p-norm; ``inf`` for the largest absolute value.

        Returns:
            A scalar, the same on every stage and for every number of stages. What has no gradient
            counts as zero.
        """
        if self._groups is None:
            raise RuntimeError("The pipeline is not set up: call this in a step or a hook.")
        owner = self._active_pipeline().owner
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return gradient_norm(listed, owner, self._groups, norm_type)

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does, over all stages. Collective over them.

        Args:
            parameters: As for :meth:`grad_norm`.
            max_norm: The norm that the gradients have at most then.
            norm_type: p of the p-norm.
            error_if_nonfinite: Whether a norm that is infinite or no number is an error.
            foreach: How PyTorch computes it; makes no difference here.

        Returns:
            The norm before, a scalar.

        Raises:
            RuntimeError: If the norm isn't finite, and that is an error.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        total = self.grad_norm(listed, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The norm of the gradients is {total.item()}, so they can't be clipped: look for"
                " the first step with an infinite loss, or give error_if_nonfinite=False."
            )
        scale_to_norm(listed, total, max_norm)
        return total

    # ------------------------------------------------------------------ the end

    @override
    def teardown(self) -> None:
        """Give the user the whole module back in host memory, on every rank, but after an error."""
        self._partition, pipeline = self.partition, self._pipeline
        self._pipeline = None
        if self._precision is not None:
            self._precision.remove()
            self._precision = None
        if pipeline is not None:
            pipeline.close(restore=not self.is_interrupted)
        for average in self._averages:
            average.close(restore=not self.is_interrupted)
        self._averages = []
        self._run.close()
        self.disconnect()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _active_pipeline(self) -> PipelinedModule:
        if self._pipeline is None:
            raise RuntimeError(
                "The pipeline is not set up: steps run inside Trainer.fit, validate, test or"
                " predict."
            )
        return self._pipeline
