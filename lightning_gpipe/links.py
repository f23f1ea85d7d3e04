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
        data: Group for what all stages exchange.
        downs: Groups for activations. Two links of one stage use different ones where a backend
            runs the messages of a group in order, so that no send waits for a later receive.
        ups: The same for gradients.
        through_host: Whether ``data``, ``downs`` and ``ups`` reach host memory only.
        control: The control channel.
    """

    stage: int
    ranks: tuple[int, ...]
    device: torch.device
    host: dist.ProcessGroup
    data: dist.ProcessGroup
    downs: tuple[dist.ProcessGroup, ...]
    ups: tuple[dist.ProcessGroup, ...]
    through_host: bool
    control: Control

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

    def close(self) -> None:
        """Destroy the groups, once every stage is through with them. Collective."""
        self.control.flush()
        dist.barrier(self.host)
        for group in dict.fromkeys((self.host, self.data, *self.downs, *self.ups)):
            dist.destroy_process_group(group)

    def channel(self, neighbour: int, lanes: tuple[dist.ProcessGroup, ...]) -> Channel | None:
        """The channel to a neighbouring stage over ``downs`` or ``ups``, if there is one."""
        if not 0 <= neighbour < self.stages:
            return None
        data = lanes[min(self.stage, neighbour) % len(lanes)]
        return Channel(self.ranks[neighbour], self.host, data, self.device, self.through_host)
