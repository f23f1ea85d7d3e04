"""What crosses between two stages, and sending it.

A boundary is a pytree. For every micro-batch a link sends a small *header*, always on the host, and then the tensors'
bytes. The header says "as the last time in this place", or carries the new *signature*: tree, shapes, strides, types.
So nothing assumes equal micro-batches or steps.

Receives are posted ahead. A receive needs its size, so the tensors of a micro-batch are received ahead only where the
signature was the same the last two times. Both ends know that: when it changes all the same, the sender fills the
posted receives with bytes that the receiver throws away, and sends the tensors beside them, over the headers' group,
where they can't meet receives that were posted for later micro-batches. A send is not waited for until a few more were
made: then its memory is needed.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe import layout
from lightning_gpipe.microbatch import Tree

_HEADER, _BESIDE, _DATA = 1, 2, 3  # message tags, as far as the backend knows tags
_AHEAD = 2  # micro-batches that a receiver posts ahead
# Micro-batches that a sender leaves under way before it waits for the oldest: gloo tells of a finished send only to
# who waits for it. The receiver has posted its receives by then unless it is behind, and then there is nothing to win.
_IN_FLIGHT = _AHEAD + 1


@dataclass(frozen=True, slots=True)
class TensorType:
    """Everything about a tensor but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the wire."""
        return layout.byte_count(self.shape, self.stride, self.dtype)


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything about a boundary but its tensors' values.

    Args:
        spec: The structure.
        leaves: For each leaf its :class:`TensorType`, or its value if it is no tensor.
    """

    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Tree, requires_grad: Sequence[bool]) -> Signature:
        """The signature of a boundary.

        Args:
            tree: The boundary.
            requires_grad: For each leaf whether the next stage returns its gradient.
        """
        return cls(
            tree.spec,
            tuple(
                TensorType(leaf.shape, leaf.stride(), leaf.dtype, wants) if isinstance(leaf, Tensor) else leaf
                for leaf, wants in zip(tree.leaves, requires_grad, strict=True)
            ),
        )

    @property
    def tensor_types(self) -> list[TensorType]:
        """The types of the leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorType)]

    @property
    def requires_grad(self) -> list[bool]:
        """For each leaf whether it wants a gradient."""
        return [isinstance(leaf, TensorType) and leaf.requires_grad for leaf in self.leaves]

    def fill(self, tensors: Iterable[Tensor]) -> Tree:
        """A boundary of this signature around the given tensors."""
        values = iter(tensors)
        return Tree([next(values) if isinstance(leaf, TensorType) else leaf for leaf in self.leaves], self.spec)

    def same(self, other: Signature | None) -> bool:
        """Whether two signatures are equal, the types of their constants included (``1 == True`` is not enough)."""
        return other is not None and self == other and list(map(type, self.leaves)) == list(map(type, other.leaves))


@dataclass(slots=True)
class _Memory:
    """What both ends of a link remember of one place in the order of micro-batches."""

    signature: Signature | None = None
    stable: bool = False

    @property
    def expected(self) -> list[TensorType]:
        """What the receiver has posted ahead."""
        return self.signature.tensor_types if self.signature is not None and self.stable else []

    def update(self, signature: Signature) -> None:
        self.stable = signature.same(self.signature)
        self.signature = signature


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two neighbouring ranks.

    Args:
        peer: Global rank of the other end.
        headers: A gloo group for headers.
        data: The group for the tensors' bytes; of this direction alone, so that neither direction can block the other.
        device: Where the tensors live.
        through_host: Whether the bytes go through host memory, because ``data`` can't reach the device.
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
        memory = self._memory.setdefault(place, _Memory())
        signature = Signature.of(tree, requires_grad)
        changed = not signature.same(memory.signature)
        blob = pickle.dumps(signature) if changed else b""
        self._post(torch.tensor([place, len(blob)]), self.channel.headers, _HEADER)
        mispredicted = changed and memory.stable
        if mispredicted:
            for expected in memory.expected:
                self._post_data(torch.empty(expected.nbytes, dtype=torch.uint8, device=self.channel.wire_device))
        if changed:
            self._post(torch.frombuffer(bytearray(blob), dtype=torch.uint8), self.channel.headers, _BESIDE)
        for tensor in tree.tensors():
            data = layout.to_bytes(tensor)
            if mispredicted:
                self._post(data.cpu(), self.channel.headers, _BESIDE)
            else:
                self._post_data(data.to(self.channel.wire_device))
        memory.update(signature)

    def flush(self) -> None:
        """Wait until everything sent has left its memory."""
        while self._pending:
            self._pending.popleft()[2].wait()

    def _post_data(self, data: Tensor) -> None:
        self._post(data, self.channel.data, _DATA)

    def _post(self, data: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        if data.numel():
            self._pending.append((self._sent, data, dist.isend(data, self.channel.peer, group, tag)))


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
            RuntimeError: If another micro-batch arrives: the two stages don't run the same schedule.
        """
        slot = self._slots[0]
        _wait(slot.header_work)
        arrived, blob_length = slot.header.tolist()
        if arrived != place or slot.place != place:
            raise RuntimeError(
                f"Expected micro-batch {place} from rank {self.channel.peer}, but got {arrived}: the two stages do not"
                " run the same step. Call the backbone on every rank alike, never under `if rank == 0`."
            )
        memory = slot.memory
        signature = memory.signature
        if blob_length:
            blob, work = self._post_beside(blob_length)
            _wait(work)
            signature = pickle.loads(blob.numpy().tobytes())
        if signature is None:
            raise RuntimeError(f"Rank {self.channel.peer} sent micro-batch {place} without a signature.")
        if slot.data is None:
            slot.data = [self._post_data(kind) for kind in signature.tensor_types]
        elif blob_length:  # mispredicted: what was posted receives nothing of use
            for _, work in slot.data:
                _wait(work)
            slot.data = [self._post_beside(kind.nbytes) for kind in signature.tensor_types]
        memory.update(signature)
        self._slots.popleft()
        self._post_ahead()
        tensors = []
        for kind, (data, work) in zip(signature.tensor_types, slot.data, strict=True):
            _wait(work)
            tensors.append(layout.from_bytes(data.to(self.channel.device), kind.shape, kind.stride, kind.dtype))
        return signature.fill(tensors), signature.requires_grad

    def _post_ahead(self) -> None:
        while self._order and len(self._slots) < _AHEAD:
            place = self._order.popleft()
            header = torch.empty(2, dtype=torch.int64)
            work = dist.irecv(header, self.channel.peer, self.channel.headers, _HEADER)
            self._slots.append(_Slot(place, self._memory.setdefault(place, _Memory()), header, work))
        for slot in self._slots:
            if slot.data is None:
                if not slot.memory.stable:
                    break  # tensors arrive in order: the next ones can't be posted before these
                slot.data = [self._post_data(kind) for kind in slot.memory.expected]

    def _post_data(self, kind: TensorType) -> _Pending:
        data = torch.empty(kind.nbytes, dtype=torch.uint8, device=self.channel.wire_device)
        return data, dist.irecv(data, self.channel.peer, self.channel.data, _DATA) if data.numel() else None

    def _post_beside(self, nbytes: int) -> _Pending:
        data = torch.empty(nbytes, dtype=torch.uint8)
        return data, dist.irecv(data, self.channel.peer, self.channel.headers, _BESIDE) if nbytes else None


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
