"""The process groups of one rank: those of its pipeline, and of its stage's replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_gpipe.comm.messages import Kind, ObjectChannel
from lightning_gpipe.comm.p2p import Channel

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Groups:
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
        pipeline: The object channel between the stages.
        siblings: The object channel over the replicas of this stage; its "stages" are the replicas.
    """

    stage: int
    ranks: tuple[int, ...]
    device: torch.device
    host: dist.ProcessGroup
    data: dist.ProcessGroup
    downs: tuple[dist.ProcessGroup, ...]
    ups: tuple[dist.ProcessGroup, ...]
    through_host: bool
    pipeline: ObjectChannel
    siblings: ObjectChannel

    @property
    def replicas(self) -> int:
        """D."""
        return len(self.siblings.ranks)

    @property
    def replica(self) -> int:
        """This rank's pipeline."""
        return self.siblings.stage

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
    def all_groups(self) -> list[dist.ProcessGroup]:
        """All of them, once each."""
        pipeline = self.host, self.data, *self.downs, *self.ups
        return list(dict.fromkeys((*pipeline, self.siblings.host, self.siblings.data)))

    def decide(self, kind: Kind, decision: Callable[[], _T]) -> _T:
        """Let rank 0 decide, and all ranks know. Collective over all pipelines.

        See :meth:`lightning_gpipe.comm.messages.ObjectChannel.decide`.
        """
        return self.pipeline.decide(kind, partial(self.siblings.decide, kind, decision))

    def close(self) -> None:
        """Destroy the groups, once every rank is through with them. Collective."""
        self.pipeline.flush()
        self.siblings.flush()
        dist.barrier(self.host)
        dist.barrier(self.siblings.host)
        for group in self.all_groups:
            dist.destroy_process_group(group)

    def channel(self, neighbour: int, lanes: tuple[dist.ProcessGroup, ...]) -> Channel | None:
        """The channel to a neighbouring stage over ``downs`` or ``ups``, if there is one."""
        if not 0 <= neighbour < self.stages:
            return None
        data = lanes[min(self.stage, neighbour) % len(lanes)]
        return Channel(self.ranks[neighbour], self.host, data, self.device, self.through_host)
