"""The process groups of one pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_gpipe.boundary import Channel
from lightning_gpipe.control import Control


@dataclass(frozen=True, slots=True)
class Links:
    """The process groups of one pipeline, and this rank's place in it.

    Args:
        stage: This rank's stage.
        ranks: Global rank of every stage.
        device: This rank's device.
        host: gloo group for control messages and headers.
        down: Group for activations.
        up: Group for gradients.
        through_host: Whether ``down`` and ``up`` reach host memory only.
    """

    stage: int
    ranks: tuple[int, ...]
    device: torch.device
    host: dist.ProcessGroup
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    through_host: bool

    @property
    def stages(self) -> int:
        """K."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first layers."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last layers."""
        return self.stage == self.stages - 1

    def control(self) -> Control:
        """The control channel."""
        return Control(
            self.stage,
            self.ranks,
            self.host,
            self.host if self.through_host else self.down,
            self.device,
        )

    def close(self) -> None:
        """Destroy the groups, once every stage is through with them. Collective."""
        dist.barrier(self.host)
        for group in (self.host, self.down, self.up):
            dist.destroy_process_group(group)

    def channel(self, neighbour: int, data: dist.ProcessGroup) -> Channel | None:
        """The channel to a neighbouring stage, if there is one."""
        if not 0 <= neighbour < self.stages:
            return None
        return Channel(self.ranks[neighbour], self.host, data, self.device, self.through_host)
