"""The process groups of one rank: those of its pipeline, and of its stage's replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_gpipe.comm.messages import Control, Kind
from lightning_gpipe.comm.p2p import Channel

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Links:
    """The process groups of one rank, and its place in its pipeline.

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
        across: The control channel over the replicas of this stage; its "stages" are the replicas.
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
    across: Control

    @property
    def replicas(self) -> int:
        """D."""
        return len(self.across.ranks)

    @property
    def replica(self) -> int:
        """This rank's pipeline."""
        return self.across.stage

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

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All of them, once each."""
        pipeline = self.host, self.data, *self.downs, *self.ups
        return list(dict.fromkeys((*pipeline, self.across.host, self.across.data)))

    def decide(self, kind: Kind, decision: Callable[[], _T]) -> _T:
        """Let rank 0 decide, and all ranks know. Collective over all pipelines.

        See :meth:`lightning_gpipe.comm.messages.Control.decide`.
        """
        return self.control.decide(kind, partial(self.across.decide, kind, decision))

    def close(self) -> None:
        """Destroy the groups, once every rank is through with them. Collective."""
        self.control.flush()
        self.across.flush()
        dist.barrier(self.host)
        dist.barrier(self.across.host)
        for group in self.groups:
            dist.destroy_process_group(group)

    def channel(self, neighbour: int, lanes: tuple[dist.ProcessGroup, ...]) -> Channel | None:
        """The channel to a neighbouring stage over ``downs`` or ``ups``, if there is one."""
        if not 0 <= neighbour < self.stages:
            return None
        data = lanes[min(self.stage, neighbour) % len(lanes)]
        return Channel(self.ranks[neighbour], self.host, data, self.device, self.through_host)
