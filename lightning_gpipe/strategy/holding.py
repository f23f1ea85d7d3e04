"""What each rank holds of a module between two runs of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.state.gather import StageTensors
from lightning_gpipe.state.optimizer_shards import OptimizerShards
from lightning_gpipe.state.optimizers import gather_optimizer
from lightning_gpipe.state.placement import Placement

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The parts of a module that nobody holds whole. Its methods are collective over all ranks.

    Args:
        placement: Which stage holds what.
        shards: Which replica keeps the optimizer state of which parameter.
        connect: Makes the process groups anew.
    """

    placement: Placement
    shards: OptimizerShards
    connect: Callable[[], Groups]

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """The module's state dict, whole on rank 0.

        Args:
            state: The module's own on this rank.
        """
        with self._tensors() as (groups, tensors):
            return state if groups.replica else tensors.gather(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict, whole on rank 0."""
        with self.connected() as groups:
            return gather_optimizer(optimizer, self.placement, self.shards, groups)

    def restore(self) -> None:
        """Bring the whole module to the host memory of every rank."""
        with self._tensors() as (_, tensors):
            tensors.restore()

    @contextmanager
    def _tensors(self) -> Iterator[tuple[Groups, StageTensors]]:
        with self.connected() as groups:
            yield groups, StageTensors(self.placement, groups.pipeline, _HOST)

    @contextmanager
    def connected(self) -> Iterator[Groups]:
        """Connect the ranks anew inside.

        Raises:
            RuntimeError: If that can't be.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "Each process holds a part of the model, and the processes are no longer connected:"
                " save a checkpoint inside the run, for example by ModelCheckpoint."
            )
        groups = self.connect()
        try:
            yield groups
        finally:
            groups.close()
