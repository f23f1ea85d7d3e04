"""What crosses between two stages, and sending it.

A boundary is a pytree. For every micro-batch a link sends a small *header*, always on the host, and
then the tensors' bytes; small tensors on the host travel in the header. The header says "as the
last time in this place", or announces a new *signature*: tree, shapes, strides, types. So nothing
assumes equal micro-batches or steps. A place is a micro-batch of a training or of an evaluating
call, since these alternate, and what crosses in them differs.

Tensors on the device travel over the data group, tensors in host memory over the headers' group:
they stay there, because some layers want them there, as ``pack_padded_sequence`` its lengths.

Receives are posted ahead. A receive needs its size, so the tensors of a micro-batch are received
ahead only where the signature was the same the last two times. Both ends know that: when it changes
all the same, the sender fills the posted receives with bytes that the receiver throws away, and
sends the tensors beside them, over the headers' group, where they can't meet receives that were
posted for later micro-batches. A send is not waited for until a few more were
made: then its memory is needed.

Through host memory, messages wait for nobody, and receives are posted as early as they can. On a
device, one may wait for another that was posted before it: a rank's receives are posted where they
stand among its sends in the order in which the schedule makes all messages, which is the same on
every rank; see :meth:`Receiver.post`.
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

from lightning_gpipe.comm.channel import BESIDE, HEADER, Channel
from lightning_gpipe.comm.packing import from_buffer, host_buffer
from lightning_gpipe.comm.signature import Signature, TensorType
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree

_PLACE_AND_LENGTH = struct.Struct("<qqq")  # training, micro-batch, bytes of a new signature
_INLINE = 1 << 16  # bytes up to which a message more costs more than a copy
_AHEAD = 2  # micro-batches that a receiver posts ahead; of small ones it posts all
# Micro-batches that a sender leaves under way at least before it waits for the oldest: gloo tells
# of a finished send only to who waits for it. The receiver has posted its receives by then unless
# it is behind, and then there is nothing to win.
_UNDER_WAY = _AHEAD + 1


_Place: TypeAlias = tuple[bool, int]  # whether the call trains, and the micro-batch


@dataclass(slots=True)
class _Memory:
    """What both ends of a link remember of one place.

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

    @property
    def nbytes(self) -> int:
        """Bytes of what crossed last."""
        return sum(k.nbytes for k in self.signature.tensor_types) if self.signature else 0

    def update(self, signature: Signature, channel: Channel) -> None:
        """Remember what was sent; a signature that didn't change is the same object."""
        stable = signature is self.signature
        if stable != self.stable:
            sizes = tuple(k.nbytes for k in signature.tensor_types if channel.is_in_host(k))
            self.inline = sizes if stable and 0 < sum(sizes) <= _INLINE else ()
        self.signature, self.stable = signature, stable


_Pending: TypeAlias = tuple[Tensor, dist.Work | None]  # None: nothing to wait for


@dataclass(slots=True)
class Sender:
    """The sending end of a link.

    Args:
        channel: Its channel.
        under_way: The number of micro-batches that may be under way.
    """

    channel: Channel
    under_way: int = _UNDER_WAY
    _memory: dict[_Place, _Memory] = field(default_factory=dict)
    _sent: int = 0
    _pending: deque[tuple[int, Tensor, dist.Work]] = field(default_factory=deque)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Send a boundary, without waiting for it to arrive.

        Args:
            m: The micro-batch.
            tree: The boundary; its memory must not be changed afterwards.
            requires_grad: For each leaf whether the other end returns a gradient for it.
            training: Whether the call trains; the receiver expects the same.
        """
        self._sent += 1
        while self._pending and self._pending[0][0] <= self._sent - self.under_way:
            self._pending.popleft()[2].wait()
        memory, channel = self._memory.setdefault((training, m), _Memory()), self.channel
        signature = memory.signature
        changed = signature is None or not signature.matches(tree, requires_grad)
        if signature is None or changed:
            signature = Signature.of(tree, requires_grad)
        blob = pickle.dumps(signature) if changed else b""
        header = from_buffer(_PLACE_AND_LENGTH.pack(training, m, len(blob)))
        data = [
            strides.to_bytes(tensor).to(channel.lane(kind)[0])
            for kind, tensor in zip(signature.tensor_types, tree.tensors(), strict=True)
        ]
        if not changed:
            self._post_tensors(header, data, memory)
        else:
            nothing = [
                torch.zeros(kind.nbytes, dtype=torch.uint8, device=channel.lane(kind)[0])
                for kind in memory.expected
            ]
            self._post_tensors(header, nothing, memory)
            self._post(from_buffer(blob), channel.headers, BESIDE)
            for kind, part in zip(signature.tensor_types, data, strict=True):
                if memory.stable:
                    self._post(part.cpu(), channel.headers, BESIDE)
                else:
                    self._post(part, *channel.lane(kind)[1:])
        memory.update(signature, channel)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest boundary that was sent last in its place."""
        return max((memory.nbytes for memory in self._memory.values()), default=0)

    def allow(self, under_way: int) -> None:
        """Let so many micro-batches be under way before the oldest is waited for."""
        self.under_way = max(under_way, _UNDER_WAY)

    def flush(self) -> None:
        """Wait until everything sent has left its memory."""
        while self._pending:
            self._pending.popleft()[2].wait()

    def _post_tensors(self, header: Tensor, data: Sequence[Tensor], memory: _Memory) -> None:
        """Send what the receiver has posted, or posts when it knows that nothing has changed."""
        kinds = memory.signature.tensor_types if memory.signature is not None and data else ()
        pairs = list(zip(kinds, data, strict=True))
        if memory.inline:
            inline = [part for kind, part in pairs if self.channel.is_in_host(kind)]
            pairs = [pair for pair in pairs if not self.channel.is_in_host(pair[0])]
            header = torch.cat([header, *inline])
        self._post(header, self.channel.headers, HEADER)
        for kind, part in pairs:
            self._post(part, *self.channel.lane(kind)[1:])

    def _post(self, data: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        work = self.channel.send(data, group, tag)
        if work is not None:
            self._pending.append((self._sent, data, work))


@dataclass(slots=True)
class _Slot:
    """A receive that is under way.

    Args:
        place: What comes.
        memory: What is remembered of that place.
        header: Its header, and the tensors that travel in it.
        header_work: Its receive.
        data: Its tensors' receives, once posted.
        signature: What comes, once the header was read.
        beside: The receives of tensors that came beside those that were posted.
    """

    place: _Place
    memory: _Memory
    header: Tensor
    header_work: dist.Work | None
    data: list[_Pending] | None = None
    signature: Signature | None = None
    beside: list[_Pending] | None = None


@dataclass(slots=True)
class Receiver:
    """The receiving end of a link."""

    channel: Channel
    _memory: dict[_Place, _Memory] = field(default_factory=dict)
    _order: deque[_Place] = field(default_factory=deque)
    _slots: deque[_Slot] = field(default_factory=deque)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest boundary that arrived last in its place."""
        return max((memory.nbytes for memory in self._memory.values()), default=0)

    def expect(self, order: Iterable[int], training: bool) -> None:
        """Announce which micro-batches come next, and post the first receives.

        Args:
            order: The micro-batches, in the order in which the other end sends them.
            training: Whether the call trains.
        """
        self._order.extend((training, m) for m in order)
        self._post_ahead()

    def post(self, m: int) -> None:
        """Post the receives up to an announced micro-batch's, if their order matters.

        Waits for headers where it isn't known what comes.
        """
        if self.channel.through_host:
            return
        while all(slot.place[1] != m for slot in self._slots):
            self._slots.append(self._new_slot(self._order.popleft()))
        for slot in self._slots:
            if slot.data is None:
                self._post_slot(slot)
            if slot.place[1] == m:
                return

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """Wait for the next boundary.

        Args:
            m: The micro-batch that must come next.

        Returns:
            The boundary, in memory of its own, and for each leaf whether it wants a gradient.

        Raises:
            RuntimeError: If another micro-batch arrives: the two stages don't run the same
                schedule.
        """
        slot = self._slots[0]
        signature = self._read_header(slot)
        if slot.place[1] != m:
            raise self._other_than(m, slot.place)
        if slot.data is None:
            self._post_slot(slot)
        if slot.beside is not None:  # what was posted receives nothing of use
            for _, work in slot.data or ():
                _wait(work)
            slot.data = slot.beside
        slot.memory.update(signature, self.channel)
        self._slots.popleft()
        self._post_ahead()
        pairs = zip(signature.tensor_types, slot.data or (), strict=True)
        tensors = [self._tensor(kind, pending) for kind, pending in pairs]
        return signature.fill(tensors), list(signature.requires_grad)

    def _read_header(self, slot: _Slot) -> Signature:
        """Wait for a header, after those before it: what they announce comes in order, too."""
        for earlier in self._slots:
            if earlier is slot:
                break
            self._read_own_header(earlier)
        return self._read_own_header(slot)

    def _read_own_header(self, slot: _Slot) -> Signature:
        if slot.signature is not None:
            return slot.signature
        _wait(slot.header_work)
        head = slot.header[: _PLACE_AND_LENGTH.size].numpy().tobytes()
        training, m, blob_length = _PLACE_AND_LENGTH.unpack(head)
        if slot.place != (training, m):
            raise self._other_than(slot.place[1], (training, m), slot.place[0])
        signature = slot.memory.signature
        if blob_length:
            blob, work = self._post_beside(blob_length)
            _wait(work)
            signature = pickle.loads(blob.numpy().tobytes())
        if signature is None:
            raise RuntimeError(
                f"Rank {self.channel.peer} sent micro-batch {m} without a signature."
            )
        if blob_length and slot.memory.stable:
            slot.beside = [self._post_beside(kind.nbytes) for kind in signature.tensor_types]
        slot.signature = signature
        return signature

    def _other_than(self, m: int, arrived: _Place, training: bool | None = None) -> RuntimeError:
        is_other = training is not None and arrived[0] != training
        return RuntimeError(
            f"Expected micro-batch {m} from rank {self.channel.peer}, but got {arrived[1]}"
            f"{' of another mode' * is_other}: the two stages do not"
            " run the same step. Call the backbone on every rank alike, never under"
            " `if rank == 0`."
        )

    def _tensor(self, kind: TensorType, pending: _Pending) -> Tensor:
        """Wait for a tensor's bytes, and bring them where they belong."""
        data, work = pending
        _wait(work)
        if kind.device_type == self.channel.device.type:
            data = data.to(self.channel.device)
        if data.storage_offset():  # a part of a header: memory of its own, and aligned
            data = data.clone()
        return strides.from_bytes(data, kind.shape, kind.stride, kind.dtype)

    def _post_ahead(self) -> None:
        while self._order:
            memory = self._memory.setdefault(self._order[0], _Memory())
            if len(self._slots) >= _AHEAD and not memory.inline:
                break
            self._slots.append(self._new_slot(self._order.popleft()))
        for slot in self._slots if self.channel.through_host else ():
            if slot.data is None:
                if not slot.memory.stable:
                    break  # tensors arrive in order: the next ones can't be posted before these
                self._post_slot(slot)

    def _new_slot(self, place: _Place) -> _Slot:
        """Post the receive of a header."""
        memory = self._memory.setdefault(place, _Memory())
        header = host_buffer(_PLACE_AND_LENGTH.size + sum(memory.inline))
        work = self.channel.receive(header, self.channel.headers, HEADER)
        return _Slot(place, memory, header, work)

    def _post_slot(self, slot: _Slot) -> None:
        """Post the receives of tensors: what is expected, or what the header says."""
        if slot.memory.stable:
            slot.data = self._post_expected(slot)
        else:
            slot.data = [self._post_data(kind) for kind in self._read_header(slot).tensor_types]

    def _post_expected(self, slot: _Slot) -> list[_Pending]:
        """Post the receives of what doesn't travel in the header."""
        sizes = (_PLACE_AND_LENGTH.size, *slot.memory.inline)
        inline = iter(slot.header.split(sizes)[1:] if slot.memory.inline else ())
        return [
            (next(inline), None)
            if slot.memory.inline and self.channel.is_in_host(kind)
            else self._post_data(kind)
            for kind in slot.memory.expected
        ]

    def _post_data(self, kind: TensorType) -> _Pending:
        wire, group, tag = self.channel.lane(kind)
        data = torch.empty(kind.nbytes, dtype=torch.uint8, device=wire)
        return data, self.channel.receive(data, group, tag)

    def _post_beside(self, nbytes: int) -> _Pending:
        data = host_buffer(nbytes)
        return data, self.channel.receive(data, self.channel.headers, BESIDE)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
