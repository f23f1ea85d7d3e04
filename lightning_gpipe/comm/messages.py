"""What ranks tell each other: objects, decisions, sums.

Every object says what it is, so that ranks that don't run the same step get an error instead of
each other's data. It takes one message, besides its large tensors, and the source waits for these
alone to arrive: so it keeps no copies of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm import packing
from lightning_gpipe.comm.mail import Work
from lightning_gpipe.comm.nearby import Transfer
from lightning_gpipe.comm.peers import HOST, Peers
from lightning_gpipe.tensors import strides

MessageKind: TypeAlias = Literal[
    "batch",
    "generators",
    "call",
    "output",
    "backward",
    "chained gradients",
    "outline",
    "weights",
    "told",
    "uses",
    "metric",
    "costs",
    "lent weights",
    "trial",
    "order of parameters",
    "options of optimizers",
    "seed",
    "partition",
    "shared state",
    "unbuilt layers",
    "outside weights",
    "shared weights",
    "stage weights",
    "replica weights",
    "restored weights",
    "gathered weights",
    "state dict",
    "optimizer state",
    "sizes",
    "new shapes",
    "kept in layers",
    "keys",
    "message time",
    "figures",
    "logged",
    "clock",
]
_T = TypeVar("_T")
# With the bytes that are sent, and their memory, which must live as long if it wasn't copied.
_Sent: TypeAlias = tuple[Work, int, Tensor | None]
_KINDS: tuple[MessageKind, ...] = get_args(MessageKind)
# What is sent is kept until it is waited for: gloo tells of a finished message only to who waits.
# That takes no time once so many others were sent, because the members run the same step.
_UNDER_WAY = 64  # messages
_HELD = 1 << 20  # bytes; a larger tensor goes in pieces, and the source waits for them
_AT_ONCE = 1 << 21  # bytes of pieces that are under way at a time, at least
#: What lives no longer than a step, so that nobody looks at another process's memory for long.
_SHORT_LIVED = ("batch", "output")
_SHARED = 1 << 24  # bytes from which such tensors aren't copied by processes of one machine


class RemoteError(RuntimeError):
    """An error of another rank."""


@dataclass(frozen=True, slots=True)
class ObjectChannel(Peers):
    """Objects between peers."""

    _pending: deque[_Sent] = field(default_factory=deque)
    _shown: list[Transfer] = field(default_factory=list)  # what isn't waited for as it is sent

    def broadcast(self, kind: MessageKind, value: Any, source: int, ahead: bool = False) -> Any:
        """Give every member an object. Collective.

        Args:
            kind: What it is; must be the same on every member.
            value: Any object that pickles; taken from the source alone. Tensors keep their strides.
                A tensor on the device arrives on the receiver's device, one on the host stays
                there.
            source: The member that has it.
            ahead: Whether the source goes on while others haven't come to it, until it is the
                source of something ahead again. Tensors in host memory then lie there twice, as far
                as they are large. Counts on the source alone.

        Returns:
            The object itself on the source, a copy elsewhere.

        Raises:
            RuntimeError: If the source broadcast something else: the ranks don't run the same step.
        """
        if self.is_alone:
            return value
        if self.index == source:
            self._broadcast_from_here(kind, value, ahead)
            return value
        parent, children = self._tree(source)
        under_way: list[_Sent] = []

        def receive(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
            if group is not self.host:
                if buffer.numel():
                    dist.broadcast(buffer, self.ranks[source], group)
                return buffer
            if buffer.nbytes <= _HELD:
                self._post_copy(children, self.await_from(parent, buffer))
                return buffer
            for piece in buffer.split(_HELD):  # others get it while the next one comes
                self._post_piece(children, self.await_from(parent, piece), under_way)
            return buffer

        received = self._unpack(kind, source, receive, self.device)
        _wait_for(under_way)
        return received

    def decide(self, kind: MessageKind, decision: Callable[[], _T]) -> _T:
        """Let the first member decide, and all know. Collective.

        Args:
            kind: What is decided.
            decision: Called on the first member only.

        Raises:
            Exception: What ``decision`` raises; on the others a RemoteError with its message.
        """
        if self.index != 0:
            failed, value = self.broadcast(kind, None, source=0)
            if failed:
                raise RemoteError(f"{self.name(0).capitalize()} failed: {value}")
            return cast(_T, value)
        try:
            result = decision()
        except Exception as error:
            self.broadcast(kind, (True, f"{type(error).__name__}: {error}"), source=0)
            self.flush()
            raise
        self.broadcast(kind, (False, result), source=0)
        return result

    def send(self, kind: MessageKind, value: Any, to: int) -> None:
        """Send an object to one member, and wait until it is gone.

        The other end must receive it.
        """
        blob, tensors = packing.pack(value, self.is_in_host("cpu"))
        for part in packing.frames(_KINDS.index(kind), blob):
            _wait_for(self._posted([to], part))
        for tensor in tensors:
            wire, group = self.route(tensor.device.type)
            part = strides.to_bytes(tensor).to(wire)
            if group is self.host:
                _wait_for(self._posted([to], part))
            elif part.numel():
                dist.send(part, self.ranks[to], group)

    def receive(self, kind: MessageKind, source: int, device: torch.device | None = None) -> Any:
        """Receive what a member sends with :meth:`send`.

        Args:
            kind: What it is.
            source: The member that sends it.
            device: Where tensors of the source's device arrive; None: on this rank's.

        Raises:
            RuntimeError: If the source sent something else: the ranks don't run the same step.
        """

        def receive(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
            if group is self.host:
                return self.await_from(source, buffer)
            if buffer.numel():
                dist.recv(buffer, self.ranks[source], group)
            return buffer

        return self._unpack(kind, source, receive, device or self.device)

    def gather(self, kind: MessageKind, value: Any) -> list[Any]:
        """Every member's object, by index; see :meth:`broadcast`. Collective."""
        found = [self.broadcast(kind, value, source=i) for i in range(len(self.ranks))]
        self.flush()
        return found

    def close(self) -> None:
        """Destroy the groups, once every member is through with them. Collective."""
        if self.groups is None:
            return
        self.flush()
        dist.barrier(self.host)
        for group in dict.fromkeys(self.groups):
            dist.destroy_process_group(group)

    def flush(self) -> None:
        """Wait until everything broadcast from here has arrived."""
        while self._pending:
            self._pending.popleft()[0].wait()
        self._flush_shown()

    def _flush_shown(self) -> None:
        while self._shown:
            self._shown.pop().wait()

    def _broadcast_from_here(self, kind: MessageKind, value: Any, ahead: bool) -> None:
        limit: float = math.inf
        if kind in _SHORT_LIVED and self.has_one_memory:
            limit = _HELD + 1 if ahead else _SHARED
        if ahead:
            self._flush_shown()
        blob, tensors = packing.pack(value, self.is_in_host("cpu"), limit, kind == "batch")
        children = self._tree(self.index)[1]
        under_way: list[_Sent] = []
        for part in packing.frames(_KINDS.index(kind), blob):
            self._post_to(children, part)
        for tensor in tensors:
            part = strides.to_bytes(tensor)
            if self.is_in_host(tensor.device.type):
                part = part.to(HOST)
                if part.nbytes >= limit and tensor.is_cpu:
                    shown = self.show(part)
                    if ahead and part.nbytes < _SHARED:
                        self._shown.append(shown)
                elif part.nbytes <= _HELD:  # the caller may change it
                    self._post_copy(children, part)
                else:
                    for piece in part.split(_HELD):
                        self._post_piece(children, piece, under_way)
            elif part.numel():
                # no copy: what changes or frees the tensor comes later on the device's stream,
                # which waits here, while the host goes on
                dist.broadcast(part, self.ranks[self.index], self.data)
        _wait_for(under_way)

    def _post_copy(self, members: Sequence[int], data: Tensor) -> None:
        """Send a copy of host memory."""
        if members:
            self._post_to(members, data.clone())

    def _post_piece(self, members: Sequence[int], data: Tensor, under_way: list[_Sent]) -> None:
        """Send a piece of what is large.

        Args:
            members: To whom.
            data: In host memory; it must not change before what is under way has arrived.
            under_way: Takes what the caller must wait for.
        """
        while sum(nbytes for _, nbytes, _ in under_way) > _AT_ONCE:
            under_way.pop(0)[0].wait()
        under_way += self._posted(members, data)

    def _tree(self, source: int) -> tuple[int, list[int]]:
        """From whom a member gets what the source has, and to whom it hands it on.

        A binomial tree: with every level twice as many have it.
        """
        count = len(self.ranks)
        place = (self.index - source) % count
        step = place & -place or 1 << count.bit_length()  # the lowest bit
        below = [place + bit for bit in _powers_below(step) if place + bit < count]
        return (place - step + source) % count, [(child + source) % count for child in below]

    def _post_to(self, members: Sequence[int], data: Tensor) -> None:
        """Send host memory without waiting for it to arrive."""
        while len(self._pending) > _UNDER_WAY or sum(n for _, n, _ in self._pending) > _HELD:
            self._pending.popleft()[0].wait()  # raises what went wrong
        self._pending.extend(self._posted(members, data))

    def _posted(self, members: Sequence[int], data: Tensor) -> list[_Sent]:
        works = [self.post(data, to) for to in members]
        return [
            (work, data.nbytes, None if isinstance(work, Transfer) else data)
            for work in works
            if work is not None
        ]

    def _unpack(
        self,
        kind: MessageKind,
        source: int,
        receive: Callable[[Tensor, dist.ProcessGroup], Tensor],
        device: torch.device,
    ) -> Any:
        frame = receive(packing.host_buffer(packing.FRAME), self.host)
        code, blob, missing = packing.open_frame(frame)
        if _KINDS[code] != kind:
            raise RuntimeError(
                f"{self.name(self.index).capitalize()} expected a message of kind '{kind}' from"
                f" {self.name(source)}, which sent '{_KINDS[code]}': the {self.member}s do not run"
                " the same step. Call the model, the Trainer and its data loaders on every rank"
                " alike, never under `if rank == 0`, and set trainer.should_stop on all."
            )
        if missing:
            blob += receive(packing.host_buffer(missing), self.host).numpy().tobytes()

        def fetch(length: int, where: str) -> Tensor:
            if where == packing.SHARED:
                return (self.look_at if length >= _SHARED else self.copy_of)(source, length)
            wire, group = self.route(where)
            data = receive(torch.empty(length, dtype=torch.uint8, device=wire), group)
            return data if where == "cpu" else data.to(device)

        return packing.unpack(blob, fetch)


def _wait_for(sent: Iterable[_Sent]) -> None:
    for work, *_ in sent:
        work.wait()


def _powers_below(limit: int) -> Iterator[int]:
    """The powers of two below one, the largest first."""
    while limit > 1:
        limit //= 2
        yield limit
