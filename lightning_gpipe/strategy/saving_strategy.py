"""Checkpoints of a module whose parts are on several processes, as Lightning sees them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.lazy import LazyModule
from lightning_gpipe.model.parameters import loading_in_part, materialize_elsewhere
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.pipeline.pipeline import Parts
from lightning_gpipe.state.parts import Part, Share, names_of
from lightning_gpipe.state.stored import Stored
from lightning_gpipe.strategy import saving
from lightning_gpipe.strategy.checkpoint_io import (
    WholeFileIO,
    raise_if_failed,
    save_part,
    wait_for_parts,
)
from lightning_gpipe.strategy.holding import HeldParts
from lightning_gpipe.strategy.launcher import MultiProcessingLauncher
from lightning_gpipe.strategy.processes import ProcessesStrategy
from lightning_gpipe.strategy.run import Run


class SavingStrategy(ProcessesStrategy):
    """A strategy that gathers what it saves, or lets each rank save its part, and loads either.

    Args:
        arguments: Passed to :class:`ProcessesStrategy`.
        options: The same.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._partition: Partition | None = None
        self._run: Run | None = None  # from setup to teardown
        self._parts: Parts | None = None  # what each rank holds since the last run
        self._is_ending = False  # what is saved now is saved because of a signal

    @property
    def partition(self) -> Partition | None:
        """Which layers each stage has; None until the module is cut, by the first step."""
        return self._run.pipeline.partition if self._run is not None else self._partition

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._run is not None:
            return self._run.state_dict()
        state = super().lightning_module_state_dict()
        is_gathered = self._held and not self._settings.save_distributed_checkpoint
        return self._held.state_dict(state) if self._held and is_gathered else state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        unwrapped: Optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._run is not None:
            return self._run.optimizer_state_dict(unwrapped)
        if self._held is not None and not self._settings.save_distributed_checkpoint:
            return self._held.optimizer_state(unwrapped)
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        launcher = self.launcher
        if isinstance(launcher, MultiProcessingLauncher) and launcher.has_lost_run:
            can_gather, has_saved = False, launcher.has_saved
        else:
            can_gather, has_saved = self._can_gather, self._has_saved
        if not can_gather:
            if not has_saved:
                saving.warn_of_loss(filepath)
            return
        if self._outlives_fit:
            saving.refuse_without_optimizers(checkpoint, filepath, self._start_method)
        how = saving.record(self.chunks, self.stages, self.replicas, self.partition)
        checkpoint[saving.RECORD] = how
        if self._settings.save_distributed_checkpoint:
            self._save_parts(checkpoint, filepath, storage_options)
        else:
            with saving.named(filepath):
                super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_parts(self, checkpoint: Any, filepath: Any, storage_options: Any) -> None:
        """Write this rank's part, where all write; else the first rank writes all it has."""
        run = self._run if not self.is_interrupted else None
        keys = frozenset(self._module.state_dict() if run is None else run.pipeline.state_dict())
        share = partial(Share, self.is_global_zero, keys)
        names, tied = names_of(self._module, self.optimizers)
        if run is not None:
            own = share(run.pipeline.writes(), names, tied)
            part, plugin = (
                Part(checkpoint, own, self._connected.groups.everyone),
                self.checkpoint_io,
            )
            if self._is_ending:  # the background may have no time left
                wait_for_parts(plugin)
            in_time = WholeFileIO() if self._is_ending else plugin
            save_part(in_time, part, filepath, storage_options)
        elif self._held is not None:
            with self._held.connected() as groups:
                own = share(self._held.placement.writes(groups.replica), names, tied)
                part = Part(checkpoint, own, groups.everyone)
                save_part(WholeFileIO(), part, filepath, storage_options)
        elif self.is_global_zero:  # the optimizers' state is on the first rank
            part = Part(checkpoint, share(lambda key: True, names, tied), None)
            save_part(WholeFileIO(), part, filepath, storage_options)

    @override
    def _heed_signals(self) -> None:
        self._is_ending = True
        try:
            super()._heed_signals()
        finally:
            self._is_ending = False

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._connected.end_steps()

    @override
    def teardown(self) -> None:
        try:  # what is saved in the background needs the groups
            if self._settings.save_distributed_checkpoint and not self.is_interrupted:
                wait_for_parts(self.checkpoint_io)
        finally:
            super().teardown()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._settings.save_distributed_checkpoint:
            raise_if_failed(self.checkpoint_io)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._can_gather:  # else the one to take its place isn't written
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        checkpoint = saving.read(read, checkpoint_path)
        module = self.lightning_module  # none before a run: then it is read, and that is all
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self.go_on_from(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        lazy = LazyModule.of(self._module)
        if self._run is None and lazy.kept is None:
            materialize_elsewhere(self._module)  # what an interrupted run has left
        state = checkpoint["state_dict"]
        if isinstance(state, Stored):
            run, module = self._run, self._module
            own = module.state_dict() if run is None else run.pipeline.module.state_dict()
            filled = state.fill(own)
            lazy.provide(own, filled, lambda key: state.only([key])[key])
            checkpoint = {**checkpoint, "state_dict": filled}
        with loading_in_part(), lazy.loading():
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._run is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._run.optimizer_states.load(self.optimizers, checkpoint["optimizer_states"])

    def restore_module(self) -> None:
        """Bring the whole module to the host memory of every rank. Collective over all ranks.

        For a module that was built on the meta device, of which each rank goes on holding its own
        part after a run. Others are whole then.
        """
        if self._held is not None:
            self._held.restore()
            LazyModule.of(self._module).kept = self._parts = None

    @property
    def holds_parts(self) -> bool:
        """Whether each rank holds a part of the module between two runs, and none all of it."""
        return self._run is None and self._parts is not None

    @property
    def _can_gather(self) -> bool:
        """Whether the processes that hold parts of what is saved can be waited for."""
        return not (self._layout.is_spread and self.is_interrupted) or self._outlives_fit

    @property
    def _outlives_fit(self) -> bool:
        """Whether this process has the weights of a fit that ran in others, which are gone."""
        launcher = self.launcher
        return (
            isinstance(launcher, MultiProcessingLauncher)
            and launcher.has_fit
            and self._world is None
        )

    @property
    def _held(self) -> HeldParts | None:
        """What each rank holds between two runs, if none holds all of the module."""
        if self._run is not None or self._parts is None:
            return None
        connect = partial(
            Groups.connect,
            self.stages,
            self._settings.virtual_stages,
            "gloo",
            torch.device("cpu"),
            self._timeout,
            everyone=self._settings.save_distributed_checkpoint,
        )
        return HeldParts(*self._parts, connect)

    @property
    @override
    def root_device(self) -> torch.device:
        # asked for several times a step, and the rank is read from the environment
        return super().root_device if self._run is None else self._run.pipeline.groups.device

    @property
    def _running(self) -> Run:
        if self._run is not None:
            return self._run
        raise RuntimeError("The pipeline is not set up: call this inside a run of the Trainer.")
