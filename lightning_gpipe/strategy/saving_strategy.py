"""Checkpoints of a module whose parts are on several processes, as Lightning sees them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.model.parameters import materialize
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.strategy import saving
from lightning_gpipe.strategy.processes import ProcessesStrategy
from lightning_gpipe.strategy.run import Run


class SavingStrategy(ProcessesStrategy):
    """A strategy that gathers what it saves, and shares out what it loads.

    Args:
        arguments: Passed to :class:`ProcessesStrategy`.
        options: The same.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._partition: Partition | None = None
        self._run: Run | None = None  # from setup to teardown

    @property
    def partition(self) -> Partition | None:
        """Which layers each stage has; None until the module is cut, by the first step."""
        return self._run.pipeline.partition if self._run is not None else self._partition

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._run is None:
            return super().lightning_module_state_dict()
        return self._run.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._run is None:
            return super().optimizer_state(optimizer)
        return self._run.optimizer_state_dict(getattr(optimizer, "_optimizer", optimizer))

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if not self._can_gather:
            if not self._has_saved:
                saving.warn_of_loss(filepath)
            return
        how = saving.record(self.chunks, self.stages, self.replicas, self.partition)
        checkpoint[saving.RECORD] = how
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._can_gather:  # else the one to take its place isn't written
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        checkpoint = saving.read(read, checkpoint_path)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self.go_on_from(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._run is None:
            materialize(self._module)  # what an earlier run left
        with warnings.catch_warnings():  # what this stage doesn't hold stays on meta
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._run is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._run.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"])

    @property
    def _running(self) -> Run:
        if self._run is not None:
            return self._run
        raise RuntimeError("The pipeline is not set up: call this inside a run of the Trainer.")
