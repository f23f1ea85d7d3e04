"""What crosses between two stages, and sending it.

A boundary is a pytree. For every micro-batch a link sends a small *header*, always on the host, and
then the tensors' bytes; tensors that travel through host memory go in one *packet* with the header,
unless they are large. The header says "as the last time in this place", or announces a new
*signature*: tree, shapes, strides, types. So nothing assumes equal micro-batches or steps. A place
is a micro-batch of a training or of an evaluating call, since these alternate, and what crosses in
them differs.

Tensors on the device travel over the data group, tensors in host memory over the headers' group:
they stay there, because some layers want them there, as ``pack_padded_sequence`` its lengths.

Receives are posted ahead. A receive needs its size, so the tensors of a micro-batch are received
ahead only where the signature was the same the last two times. Both ends know that: when it changes
all the same, the sender fills the posted receives with bytes that the receiver throws away, and
sends the tensors beside them, over the headers' group, where they can't meet receives that were
posted for later micro-batches. A send is not waited for until a few more were made, or its
gradient has come: then its memory is needed.

Through host memory, messages wait for nobody, and receives are posted as early as they can. On a
device, one may wait for another that was posted before it: a rank's receives are posted where they
stand among its sends in the order in which the schedule makes all messages, which is the same on
every rank; see :meth:`Receiver.post`.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from lightning_gpipe.comm.channel import BESIDE, HEADER, Channel
from lightning_gpipe.comm.mail import PointToPoint, Work
from lightning_gpipe.comm.nearby import Transfer
from lightning_gpipe.comm.packet import Packet, PacketLayouts, Sent, wait_for
from lightning_gpipe.comm.packing import from_buffer, host_buffer
from lightning_gpipe.comm.remembered import MessagePlace, Remembered
from lightning_gpipe.comm.signature import Signature, TensorType
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree

_SMALL = 1 << 16  # bytes of a packet's tensors up to which all its receives are posted at once
_AHEAD = 2  # micro-batches that a receiver posts ahead; of small ones it posts all
# Micro-batches that a sender leaves under way at least before it waits for the oldest: gloo tells
# of a finished send only to who waits for it. The receiver has posted its receives by then unless
# it is behind, and then there is nothing to win.
_UNDER_WAY = _AHEAD + 1


_Pending: TypeAlias = tuple[Tensor, Work | None]  # None: nothing to wait for


@dataclass(slots=True)
class Sender:
    """The sending end of a link.

    Args:
        channel: Its channel.
        under_way: The number of micro-batches that may be under way.
    """

    channel: Channel
    under_way: int = _UNDER_WAY
    _layouts: PacketLayouts = field(default_factory=PacketLayouts)
    _memory: dict[MessagePlace, Remembered] = field(default_factory=dict)
    _sent: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)  # by the micro-batch
    _pending: deque[Sent] = field(default_factory=deque)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Send a boundary, without waiting for it to arrive.

        Args:
            m: The micro-batch.
            tree: The boundary; its memory must not be changed afterwards.
            requires_grad: For each leaf whether the other end returns a gradient for it.
            training: Whether the call trains; the receiver expects the same.
        """
        self._sent += 1
        self._numbers[m] = self._sent
        while self._pending:
            oldest = self._pending[0]
            # a copy is taken only when the receiver comes to it, not as soon as it is posted for
            ahead = self.under_way + (_AHEAD if oldest.data is None else 0)
            if oldest.number > self._sent - ahead:
                break
            self._pending.popleft().wait()
        memory = self._memory.get((training, m))
        if memory is None:
            memory = self._memory[training, m] = Remembered(self._layouts[()])
        signature = memory.signature
        if signature is None or not signature.matches(tree, requires_grad):
            signature = Signature.of(tree, requires_grad)
            self._send_changed(m, tree, signature, training, memory)
        else:
            packet = memory.layout.packet()
            packet.write(training, m, 0)
            tensors = tree.tensors()
            if memory.is_packed:
                packet.fill(tensors)
                self._post(packet, self.channel.headers, HEADER)
            else:
                self._send_beside(packet, list(zip(signature.tensor_types, tensors, strict=True)))
        memory.update(signature, self.channel, self._layouts)

    def _send_beside(self, packet: Packet, tensors: list[tuple[TensorType, Tensor]]) -> None:
        """Send a packet, and tensors that aren't in it."""
        if packet.layout.kinds:
            packet.fill([t for kind, t in tensors if self.channel.is_in_host(kind)])
            tensors = [(kind, t) for kind, t in tensors if not self.channel.is_in_host(kind)]
        self._post(packet, self.channel.headers, HEADER)
        for kind, tensor in tensors:
            wire, group, tag = self.channel.lane(kind)
            self._post(strides.to_bytes(tensor).to(wire), group, tag)

    def _send_changed(
        self, m: int, tree: Tree, signature: Signature, training: bool, memory: Remembered
    ) -> None:
        """Send a boundary that isn't as the last time, after what the receiver has posted for."""
        blob, channel = pickle.dumps(signature), self.channel
        packet = memory.layout.packet()
        packet.write(training, m, len(blob))
        self._post(packet, channel.headers, HEADER)
        for kind in memory.beside(channel):
            wire, group, tag = channel.lane(kind)
            self._post(torch.zeros(kind.nbytes, dtype=torch.uint8, device=wire), group, tag)
        self._post(from_buffer(blob), channel.headers, BESIDE)
        for kind, tensor in zip(signature.tensor_types, tree.tensors(), strict=True):
            part = strides.to_bytes(tensor)
            if memory.stable:
                self._post(part.cpu(), channel.headers, BESIDE)
            else:
                wire, group, tag = channel.lane(kind)
                self._post(part.to(wire), group, tag)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest boundary that was sent last in its place."""
        return max((memory.nbytes for memory in self._memory.values()), default=0)

    def allow(self, under_way: int) -> None:
        """Let so many micro-batches be under way before the oldest is waited for."""
        self.under_way = max(under_way, _UNDER_WAY)

    def let_go(self, m: int) -> None:
        """Give back the memory of what was sent up to a micro-batch, which has been answered."""
        number = self._numbers.get(m, 0)
        while self._pending and self._pending[0].number <= number:
            self._pending.popleft().wait()

    def flush(self) -> None:
        """Wait until everything sent has left its memory."""
        while self._pending:
            self._pending.popleft().wait()

    def _post(self, data: Packet | Tensor, group: PointToPoint, tag: int) -> None:
        tensor = data.buffer if isinstance(data, Packet) else data
        work = self.channel.send(tensor, group, tag)
        is_copied = work is None or isinstance(work, Transfer)
        if work is not None:
            self._pending.append(Sent(self._sent, None if is_copied else data, work))
        if is_copied and isinstance(data, Packet):
            data.layout.give_back(data)


@dataclass(slots=True)
class _Slot:
    """A receive that is under way.

    Args:
        place: What comes.
        memory: What is remembered of that place.
        packet: Its header, and the tensors that travel with it.
        work: The packet's receive.
        beside: The receives of its other tensors, once posted.
        signature: What comes, once the header was read.
        instead: The receives of all tensors, where others come than those that were posted.
    """

    place: MessagePlace
    memory: Remembered
    packet: Packet
    work: Work | None
    beside: list[_Pending] | None = None
    signature: Signature | None = None
    instead: list[_Pending] | None = None


@dataclass(slots=True)
class Receiver:
    """The receiving end of a link.

    Args:
        channel: Its channel.
        answers: The sender whose boundaries are answered by those that arrive.
    """

    gives_memory: ClassVar[bool] = True
    channel: Channel
    answers: Sender | None = None
    _layouts: PacketLayouts = field(default_factory=PacketLayouts)
    _memory: dict[MessagePlace, Remembered] = field(default_factory=dict)
    _order: deque[MessagePlace] = field(default_factory=deque)
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
            if slot.beside is None:
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
        if slot.beside is None:
            self._post_slot(slot)
        tensors = self._tensors(slot, signature)
        slot.memory.update(signature, self.channel, self._layouts)
        self._slots.popleft()
        self._post_ahead()
        if self.answers is not None:
            self.answers.let_go(m)
        return signature.fill(tensors), list(signature.requires_grad)

    def _tensors(self, slot: _Slot, signature: Signature) -> list[Tensor]:
        """Wait for all tensors of a slot."""
        types, channel = signature.tensor_types, self.channel
        if slot.instead is not None:  # what was posted receives nothing of use
            for _, work in slot.beside or ():
                wait_for(work)
            return [self._tensor(k, p) for k, p in zip(types, slot.instead, strict=True)]
        packed = slot.packet.tensors(channel.device)
        if slot.memory.is_packed:
            return packed
        in_packet, beside = iter(packed), iter(slot.beside or ())
        return [
            next(in_packet) if packed and channel.is_in_host(k) else self._tensor(k, next(beside))
            for k in types
        ]

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
        wait_for(slot.work)
        training, m, blob_length = slot.packet.read()
        if slot.place != (training, m):
            raise self._other_than(slot.place[1], (training, m), slot.place[0])
        signature = slot.memory.signature
        if blob_length:
            blob, work = self._post_beside(blob_length)
            wait_for(work)
            signature = pickle.loads(blob.numpy().tobytes())
        if signature is None:
            raise RuntimeError(
                f"Rank {self.channel.peer} sent micro-batch {m} without a signature."
            )
        if blob_length and slot.memory.stable:
            slot.instead = [self._post_beside(kind.nbytes) for kind in signature.tensor_types]
        slot.signature = signature
        return signature

    def _other_than(
        self, m: int, arrived: MessagePlace, training: bool | None = None
    ) -> RuntimeError:
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
        wait_for(work)
        if kind.device_type == self.channel.device.type:
            data = data.to(self.channel.device)
        return strides.from_bytes(data, kind.shape, kind.stride, kind.dtype)

    def _post_ahead(self) -> None:
        while self._order:
            memory = self._memory.get(self._order[0])
            is_small = memory is not None and 0 < memory.layout.nbytes <= _SMALL
            if len(self._slots) >= _AHEAD and not is_small:
                break
            self._slots.append(self._new_slot(self._order.popleft()))
        if not self.channel.through_host or (self._slots and self._slots[-1].beside is not None):
            return
        for slot in self._slots:
            if slot.beside is None:
                if not slot.memory.stable:
                    break  # tensors arrive in order: the next ones can't be posted before these
                self._post_slot(slot)

    def _new_slot(self, place: MessagePlace) -> _Slot:
        """Post the receive of a packet."""
        memory = self._memory.get(place)
        if memory is None:
            memory = self._memory[place] = Remembered(self._layouts[()])
        packet = Packet(memory.layout)
        work = self.channel.receive(packet.buffer, self.channel.headers, HEADER)
        return _Slot(place, memory, packet, work)

    def _post_slot(self, slot: _Slot) -> None:
        """Post the receives of other tensors: of what is expected, or what the header says."""
        if slot.memory.stable:
            kinds: Sequence[TensorType] = slot.memory.beside(self.channel)
        else:
            kinds = self._read_header(slot).tensor_types
        slot.beside = [self._post_data(kind) for kind in kinds]

    def _post_data(self, kind: TensorType) -> _Pending:
        wire, group, tag = self.channel.lane(kind)
        data = torch.empty(kind.nbytes, dtype=torch.uint8, device=wire)
        return data, self.channel.receive(data, group, tag)

    def _post_beside(self, nbytes: int) -> _Pending:
        data = host_buffer(nbytes)
        return data, self.channel.receive(data, self.channel.headers, BESIDE)
