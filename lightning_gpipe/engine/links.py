"""What the stages of a rank are linked to: stages of other ranks, and of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpipe.comm.groups import Crossing, Groups
from lightning_gpipe.comm.p2p import Receiver, Sender
from lightning_gpipe.engine.executor import Links, Local, Sink, Source


class RankLinks:
    """The links of one rank's stages.

    Args:
        placement: For each stage its rank in the pipeline.
        groups: The process groups.
    """

    def __init__(self, placement: Sequence[int], groups: Groups) -> None:
        self._placement, self._groups = placement, groups
        self._inside: dict[tuple[int, Crossing], Local] = {}
        self._senders: dict[tuple[int, int], Sender] = {}
        self._receivers: dict[int, Receiver] = {}  # of activations, by their boundary
        self.of_stages = {
            stage: Links(
                activations_out=self._sink(stage, stage + 1, "activations"),
                activations_in=self._source(stage, stage - 1, "activations"),
                gradients_in=self._source(stage, stage + 1, "gradients"),
                gradients_out=self._sink(stage, stage - 1, "gradients"),
            )
            for stage, rank in enumerate(placement)
            if rank == groups.stage
        }

    def allow(self, leads: Mapping[tuple[int, int], int]) -> None:
        """Let senders get so far ahead of their receivers, by (source, target)."""
        for link, sender in self._senders.items():
            sender.allow(leads.get(link, 0))

    def message_s(self) -> float:
        """Seconds that a boundary takes to another rank, the longest time; collective."""
        found = [0.0]
        for boundary in range(len(self._placement) - 1):
            low, high = self._placement[boundary : boundary + 2]
            if low == high or self._groups.stage not in (low, high):
                continue
            peer = high if self._groups.stage == low else low
            there = self._groups.channel(peer, boundary, "activations")
            back = self._groups.channel(peer, boundary, "gradients")
            if self._groups.stage == low:
                found.append(there.echo_s(back, self._senders[boundary, boundary + 1].nbytes))
            else:
                there.answer(back, self._receivers[boundary].nbytes)
        return max(found)

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        for sender in self._senders.values():
            sender.flush()

    def _source(self, stage: int, neighbour: int, kind: Crossing) -> Source | None:
        if not 0 <= neighbour < len(self._placement):
            return None
        boundary, peer = min(stage, neighbour), self._placement[neighbour]
        if peer == self._groups.stage:
            return self._inside.setdefault((boundary, kind), Local())
        answers = self._senders[stage, neighbour] if kind == "gradients" else None
        receiver = Receiver(self._groups.channel(peer, boundary, kind), answers)
        if kind == "activations":
            self._receivers[boundary] = receiver
        return receiver

    def _sink(self, stage: int, neighbour: int, kind: Crossing) -> Sink | None:
        if not 0 <= neighbour < len(self._placement):
            return None
        boundary, peer = min(stage, neighbour), self._placement[neighbour]
        if peer == self._groups.stage:
            return self._inside.setdefault((boundary, kind), Local())
        sender = self._senders[stage, neighbour] = Sender(
            self._groups.channel(peer, boundary, kind)
        )
        return sender
