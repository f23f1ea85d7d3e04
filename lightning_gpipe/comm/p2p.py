"""What crosses between two stages, and sending it.

A boundary is a pytree. For every micro-batch a link sends a small *header*, always on the host, and
then the tensors' bytes; small tensors on the host travel in the header. The header says "as the
last time in this place", or announces a new *signature*: tree, shapes, strides, types. So nothing
assumes equal micro-batches or steps.

Receives are posted ahead. A receive needs its size, so the tensors of a micro-batch are received
ahead only where the signature was the same the last two times. Both ends know that: when it changes
all the same, the sender fills the posted receives with bytes that the receiver throws away, and
sends the tensors beside them, over the headers' group, where they can't meet receives that were
posted for later micro-batches. A send is not waited for until a few more were
made: then its memory is needed.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.signature import Signature, TensorType
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree

_PLACE_AND_SIGNATURE_LENGTH = struct.Struct("<qq")
_INLINE = 1 << 16  # bytes up to which a message more costs more than a copy
_HEADER, _BESIDE, _DATA = 1, 2, 3  # message tags, as far as the backend knows tags
_AHEAD = 2  # micro-batches that a receiver posts ahead; of small ones it posts all
# Micro-batches that a sender leaves under way before it waits for the oldest: gloo tells of a
# finished send only to who waits for it. The receiver has posted its receives by then unless it is
# behind, and then there is nothing to win.
_IN_FLIGHT = _AHEAD + 1


@dataclass(slots=True)
class _Memory:
    """What both ends of a link remember of one place in the order of micro-batches.

    Args:
        signature: The last one.
        stable: Whether it was the same the last two times: then it is what the receiver expects,
            and has posted.
        inline: Lengths of the tensors that then travel in the header, in bytes.
    """

    signature: Signature | None = None
    stable: bool = False
    inline: tuple[int, ...] = ()

    @property
    def expected(self) -> tuple[TensorType, ...]:
        """What the receiver has posted ahead."""
        return self.signature.tensor_types if self.signature is not None and self.stable else ()

    def update(self, signature: Signature, through_host: bool) -> None:
        """Remember what was sent; a signature that didn't change is the same object."""
        stable = signature is self.signature
        if stable != self.stable:
            sizes = tuple(kind.nbytes for kind in signature.tensor_types)
            self.inline = sizes if stable and through_host and 0 < sum(sizes) <= _INLINE else ()
        self.signature, self.stable = signature, stable


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two neighbouring ranks.

    Args:
        peer: Global rank of the other end.
        headers: A gloo group for headers.
        data: The group for the tensors' bytes; of this direction alone, so that neither direction
            can block the other.
        device: Where the tensors live.
        through_host: Whether the bytes go through host memory, because ``data`` reaches no other.
    """

    peer: int
    headers: dist.ProcessGroup
    data: dist.ProcessGroup
    device: torch.device
    through_host: bool

    @property
    def wire_device(self) -> torch.device:
        """Where the bytes are sent from and received to."""
        return torch.device("cpu") if self.through_host else self.device


_Pending: TypeAlias = tuple[Tensor, dist.Work | None]  # None: nothing to wait for


@dataclass(slots=True)
class Sender:
    """The sending end of a link."""

    channel: Channel
    _memory: dict[int, _Memory] = field(default_factory=dict)
    _sent: int = 0
    _pending: deque[tuple[int, Tensor, dist.Work]] = field(default_factory=deque)

    def send(self, place: int, tree: Tree, requires_grad: Sequence[bool]) -> None:
        """Send a boundary, without waiting for it to arrive.

        Args:
            place: The micro-batch.
            tree: The boundary; its memory must not be changed afterwards.
            requires_grad: For each leaf whether the other end returns a gradient for it.
        """
        self._sent += 1
        while self._pending and self._pending[0][0] <= self._sent - _IN_FLIGHT:
            self._pending.popleft()[2].wait()
        memory, wire = self._memory.setdefault(place, _Memory()), self.channel.wire_device
        signature = memory.signature
        changed = signature is None or not signature.matches(tree, requires_grad)
        if signature is None or changed:
            signature = Signature.of(tree, requires_grad)
        blob = pickle.dumps(signature) if changed else b""
        header = _from_buffer(_PLACE_AND_SIGNATURE_LENGTH.pack(place, len(blob)))
        data = [strides.to_bytes(tensor).to(wire) for tensor in tree.tensors()]
        if changed:
            posted = [
                torch.zeros(kind.nbytes, dtype=torch.uint8, device=wire) for kind in memory.expected
            ]
            self._post_tensors(header, posted, memory)
            self._post(_from_buffer(blob), self.channel.headers, _BESIDE)
            if memory.stable:
                for part in data:
                    self._post(part.cpu(), self.channel.headers, _BESIDE)
            else:
                self._post_data(data)
        else:
            self._post_tensors(header, data, memory)
        memory.update(signature, self.channel.through_host)

    def flush(self) -> None:
        """Wait until everything sent has left its memory."""
        while self._pending:
            self._pending.popleft()[2].wait()

    def _post_tensors(self, header: Tensor, data: Sequence[Tensor], memory: _Memory) -> None:
        if memory.inline:
            self._post(torch.cat([header, *data]), self.channel.headers, _HEADER)
        else:
            self._post(header, self.channel.headers, _HEADER)
            self._post_data(data)

    def _post_data(self, data: Iterable[Tensor]) -> None:
        for part in data:
            self._post(part, self.channel.data, _DATA)

    def _post(self, data: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        if data.numel():
            work = dist.isend(data, self.channel.peer, group, tag)
            if work is not None:
                self._pending.append((self._sent, data, work))


@dataclass(slots=True)
class _Slot:
    """A receive that is under way."""

    place: int
    memory: _Memory
    header: Tensor
    header_work: dist.Work | None
    data: list[_Pending] | None = None


@dataclass(slots=True)
class Receiver:
    """The receiving end of a link."""

    channel: Channel
    _memory: dict[int, _Memory] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)
    _slots: deque[_Slot] = field(default_factory=deque)

    def expect(self, order: Iterable[int]) -> None:
        """Announce which micro-batches come next, and post the first receives.

        Args:
            order: The micro-batches, in the order in which the other end sends them.
        """
        self._order.extend(order)
        self._post_ahead()

    def take(self, place: int) -> tuple[Tree, list[bool]]:
        """Wait for the next boundary.

        Args:
            place: The micro-batch that must come next.

        Returns:
            The boundary, in memory of its own, and for each leaf whether it wants a gradient.

        Raises:
            RuntimeError: If another micro-batch arrives: the two stages don't run the same
                schedule.
        """
        slot = self._slots[0]
        _wait(slot.header_work)
        arrived, blob_length = (
            slot.header[: _PLACE_AND_SIGNATURE_LENGTH.size].view(torch.int64).tolist()
        )
        if arrived != place or slot.place != place:
            raise RuntimeError(
                f"Expected micro-batch {place} from rank {self.channel.peer}, but got {arrived}:"
                " the two stages do not run the same step. Call the backbone on every rank alike,"
                " never under `if rank == 0`."
            )
        memory = slot.memory
        signature = memory.signature
        if blob_length:
            blob, work = self._post_beside(blob_length)
            _wait(work)
            signature = pickle.loads(blob.numpy().tobytes())
        if signature is None:
            raise RuntimeError(
                f"Rank {self.channel.peer} sent micro-batch {place} without a signature."
            )
        if slot.data is None:
            slot.data = [self._post_data(kind) for kind in signature.tensor_types]
        elif blob_length:  # mispredicted: what was posted receives nothing of use
            for _, work in slot.data:
                _wait(work)
            slot.data = [self._post_beside(kind.nbytes) for kind in signature.tensor_types]
        memory.update(signature, self.channel.through_host)
        self._slots.popleft()
        self._post_ahead()
        tensors = []
        for kind, (data, work) in zip(signature.tensor_types, slot.data, strict=True):
            _wait(work)
            if data.storage_offset():  # a part of a header: memory of its own, and aligned
                data = data.clone()
            tensors.append(
                strides.from_bytes(
                    data.to(self.channel.device), kind.shape, kind.stride, kind.dtype
                )
            )
        return signature.fill(tensors), list(signature.requires_grad)

    def _post_ahead(self) -> None:
        while self._order:
            memory = self._memory.setdefault(self._order[0], _Memory())
            if len(self._slots) >= _AHEAD and not memory.inline:
                break
            place = self._order.popleft()
            sizes = (_PLACE_AND_SIGNATURE_LENGTH.size, *memory.inline)
            header = torch.empty(sum(sizes), dtype=torch.uint8)
            work = dist.irecv(header, self.channel.peer, self.channel.headers, _HEADER)
            inline: list[_Pending] | None = None
            if memory.inline:
                inline = [(part, None) for part in header.split(sizes)[1:]]
            self._slots.append(_Slot(place, memory, header, work, inline))
        for slot in self._slots:
            if slot.data is None:
                if not slot.memory.stable:
                    break  # tensors arrive in order: the next ones can't be posted before these
                slot.data = [self._post_data(kind) for kind in slot.memory.expected]

    def _post_data(self, kind: TensorType) -> _Pending:
        data = torch.empty(kind.nbytes, dtype=torch.uint8, device=self.channel.wire_device)
        return data, dist.irecv(
            data, self.channel.peer, self.channel.data, _DATA
        ) if data.numel() else None

    def _post_beside(self, nbytes: int) -> _Pending:
        data = torch.empty(nbytes, dtype=torch.uint8)
        return data, dist.irecv(
            data, self.channel.peer, self.channel.headers, _BESIDE
        ) if nbytes else None


def _from_buffer(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
