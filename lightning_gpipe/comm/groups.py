"""The process groups of one rank: those of its pipeline, and of its stage's replicas.

Made by hand rather than as a ``DeviceMesh``, which has one group per dimension: here each needs
several, with backends of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist

from lightning_gpipe.comm.channel import Channel
from lightning_gpipe.comm.mail import Mail
from lightning_gpipe.comm.messages import MessageKind, ObjectChannel
from lightning_gpipe.comm.nearby import Nearby

_T = TypeVar("_T")
#: What crosses between stages.
Crossing: TypeAlias = Literal["activations", "gradients"]


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank, and its place in its pipeline.

    Args:
        pipeline: The object channel between the stages of this rank's pipeline.
        siblings: The object channel between the replicas of this rank's stage.
        activations: Groups that carry activations from stage to stage. Where a backend runs the
            messages of a group in order, two links of one stage use different ones, and so do two
            links between the same stages, so that no send waits for a later receive. Empty where
            there is one stage, and with gloo, which tells messages apart by their tags: each group
            has a thread that wakes a hundred times a second, beside layers that compute.
        gradients: The same for gradients, from stage to stage the other way.
        nearby: The processes of this machine with which it works.
        ends: The object channel between the first and the last stage; None: it isn't wanted, or
            this rank is neither.
        everyone: All ranks, over the host, for what they write together; None: it isn't wanted, or
            there is one.
    """

    pipeline: ObjectChannel
    siblings: ObjectChannel
    activations: tuple[dist.ProcessGroup, ...]
    gradients: tuple[dist.ProcessGroup, ...]
    nearby: Nearby
    ends: ObjectChannel | None = None
    everyone: dist.ProcessGroup | None = None

    @classmethod
    def connect(
        cls,
        stages: int,
        virtual_stages: int,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        ends: bool = False,
        everyone: bool = False,
    ) -> Groups:
        """Make this rank's groups. Collective over the world.

        Args:
            stages: K, by which the world's size is divisible: rank = replica · K + stage.
            virtual_stages: V, the number of virtual stages of each.
            backend: Backend for the tensors.
            device: This rank's device.
            timeout: How long a rank waits for another before it gives up.
            ends: Whether the first and the last stage have a channel of their own.
            everyone: Whether all ranks have a group over the host.
        """
        rank, world = dist.get_rank(), range(dist.get_world_size())
        pipelines = [[*world[first : first + stages]] for first in world[::stages]]
        siblings = [[*world[stage::stages]] for stage in range(stages)]
        replica, stage = divmod(rank, stages)
        through_host = backend == "gloo"

        def make(partition: list[list[int]], kind: str) -> dist.ProcessGroup:
            own, _ = dist.new_subgroups_by_enumeration(partition, timeout, kind)
            return cast(dist.ProcessGroup, own)

        def both(partition: list[list[int]]) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
            if len(partition[0]) == 1:
                return None
            host = make(partition, "gloo")
            return host, host if through_host else make(partition, backend)

        def between_ends() -> ObjectChannel | None:
            pairs = [[members[0], members[-1]] for members in pipelines]
            between = [member for members in pipelines for member in members[1:-1]]
            own = both([*pairs, *([one] for one in between)]) if ends and stages > 2 else None
            if own is None or rank in between:
                return None
            members = pairs[replica]
            return ObjectChannel("stage", members.index(rank), tuple(members), device, own)

        lanes = range(0 if stages == 1 or through_host else 2 * virtual_stages)
        pipeline = ObjectChannel("stage", stage, tuple(pipelines[replica]), device, both(pipelines))
        replicas = ObjectChannel("replica", replica, tuple(siblings[stage]), device, both(siblings))
        nearby = Nearby(
            rank,
            [channel.host for channel in (pipeline, replicas) if not channel.is_alone],
            timeout.total_seconds(),
        )
        groups = cls(
            pipeline.by_mail(nearby, 0),
            replicas.by_mail(nearby, 1),
            tuple(make(pipelines, backend) for _ in lanes),
            tuple(make(pipelines, backend) for _ in lanes),
            nearby,
            None if (pair := between_ends()) is None else pair.by_mail(nearby, 2),
            make([[*world]], "gloo") if everyone and len(world) > 1 else None,
        )
        if not through_host:
            groups._open_channels(stages * virtual_stages)
        return groups

    def _open_channels(self, virtual: int) -> None:
        """Send something over each channel, one after the other. Collective over the pipeline.

        The first message between two ranks may have to wait until both send or receive it: where
        each does something else first, for ever.

        Args:
            virtual: The number of virtual stages of the pipeline.
        """
        for boundary in range(virtual - 1):
            low, high = boundary % self.stages, (boundary + 1) % self.stages
            if low == high or self.stage not in (low, high):
                continue
            peer = high if self.stage == low else low
            there, back = (self.channel(peer, boundary, kind) for kind in get_args(Crossing))
            if self.stage == low:
                there.echo_s(back, nbytes=1, times=1)
            else:
                there.answer(back, nbytes=1, times=1)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.pipeline.device

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global rank of every stage."""
        return self.pipeline.ranks

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.pipeline.index

    @property
    def stages(self) -> int:
        """K."""
        return len(self.ranks)

    @property
    def replica(self) -> int:
        """This rank's pipeline."""
        return self.siblings.index

    @property
    def replicas(self) -> int:
        """D."""
        return len(self.siblings.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank runs the first layers."""
        return self.stage == 0

    @property
    def is_first_of_all(self) -> bool:
        """Whether this is rank 0."""
        return self.stage == self.replica == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last layers."""
        return self.stage == self.stages - 1

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """All of them, once each."""
        channels = self.pipeline.groups or (), self.siblings.groups or ()
        ends = self.ends.groups or () if self.ends is not None else ()
        everyone = () if self.everyone is None else (self.everyone,)
        lanes = *self.activations, *self.gradients
        return list(dict.fromkeys((*channels[0], *channels[1], *lanes, *ends, *everyone)))

    def decide(self, kind: MessageKind, decision: Callable[[], _T]) -> _T:
        """Let rank 0 decide, and all ranks know. Collective over all pipelines.

        See :meth:`lightning_gpipe.comm.messages.ObjectChannel.decide`.
        """
        return self.pipeline.decide(kind, partial(self.siblings.decide, kind, decision))

    def any_of_all(self, decision: bool) -> bool:
        """Whether any rank has decided so, told through the host. Collective over all pipelines."""
        votes = torch.tensor(int(decision), device="cpu")
        for channel in (self.pipeline, self.siblings):
            votes = channel.reduce_in_host(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def close(self) -> None:
        """Destroy the groups, once every rank is through with them. Collective."""
        self.pipeline.close()
        self.siblings.close()
        if self.ends is not None:
            self.ends.close()
        everyone = () if self.everyone is None else (self.everyone,)
        for group in (*self.activations, *self.gradients, *everyone):
            dist.destroy_process_group(group)
        self.nearby.close()

    def channel(self, peer: int, boundary: int, kind: Crossing) -> Channel:
        """The channel to another stage.

        Args:
            peer: The stage at the other end.
            boundary: The virtual stage before the boundary.
            kind: What crosses.
        """
        pipeline = self.pipeline
        lanes = self.activations if kind == "activations" else self.gradients
        rank = self.ranks[peer]
        place = dist.get_group_rank(pipeline.host, rank)
        number = 2 * boundary + (kind == "gradients")
        headers = Mail(pipeline.host, self.ranks, self.nearby, 0)
        lane = 2 * (boundary // self.stages) + boundary % 2
        data = headers if pipeline.through_host else lanes[lane % len(lanes)]
        return Channel(rank, place, headers, data, self.device, pipeline.through_host, number)
