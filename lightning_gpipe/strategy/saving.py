"""What the Trainer saves and loads: the whole model's state, from stages and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.model.parameters import materialize
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy import callbacks
from lightning_gpipe.strategy import checkpoint_io as files
from lightning_gpipe.strategy.processes import PipelineProcesses


class PipelineState(PipelineProcesses):
    """The state of the module and the optimizers, as if they were whole.

    Args:
        options: Passed to :class:`PipelineProcesses`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pipeline: PipelinedModule | None = None
        self._partition: Partition | None = None

    @property
    def partition(self) -> Partition | None:
        """Which layers each stage has; None until the module is cut, by the first step."""
        return self._pipeline.partition if self._pipeline is not None else self._partition

    @override
    def setup_environment(self) -> None:
        self._checkpoint_io = files.with_whole_files(self._checkpoint_io)
        super().setup_environment()
        module = self.lightning_module
        if module is not None and self.global_rank and callbacks.copies_module(self._callbacks):
            materialize(module)  # what an earlier run left on meta can't be copied

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state dict on rank 0; the same keys elsewhere. Collective."""
        if self._pipeline is None or not self._can_gather():
            return super().lightning_module_state_dict()
        return self._pipeline.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state dict on rank 0; this stage's part elsewhere. Collective."""
        if self._pipeline is None or not self._can_gather():
            return super().optimizer_state(optimizer)
        return self._pipeline.optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))

    def _can_gather(self) -> bool:
        """Whether the stages that hold parts of the model can be waited for."""
        return self.stages == 1 or not self.is_interrupted

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint on rank 0, with a record of how it was trained.

        After an exception none is written, so that the error isn't hidden by one of its own.
        """
        if not self._can_gather():
            rank_zero_warn(
                f"{filepath} is not saved, because the run has failed: the other stages, which hold"
                " parts of the model, may be gone. The last checkpoint is the one saved before."
            )
            return
        checkpoint[files.RECORD] = files.record(
            self.chunks, self.stages, self.replicas, self.partition
        )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on rank 0, unless the one to take its place isn't written."""
        if self._can_gather():
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, on every rank."""
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        checkpoint = files.read(read, checkpoint_path)
        difference = files.difference(checkpoint, self.chunks)
        if difference is not None and self._trainer().state.fn == TrainerFn.FITTING:
            rank_zero_warn(difference)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the whole module's weights; what this stage doesn't hold stays on meta."""
        if self._pipeline is None and self.lightning_module is not None:
            materialize(self.lightning_module)  # what an earlier run left
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this stage's part of the optimizers' state."""
        if self._pipeline is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(self._pipeline.own_optimizer_state(optimizer, state))
        self._pipeline.adopt_optimizers()

    def _trainer(self) -> pl.Trainer:
        if self.lightning_module is None:
            raise RuntimeError("The strategy has no module: use it through a Trainer.")
        return self.lightning_module.trainer
