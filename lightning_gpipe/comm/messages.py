"""Objects between the stages of one pipeline: batches, outputs, decisions, state.

Every message says what it is, so that ranks that don't run the same step get an error instead of
each other's data. A message is a frame of fixed size, the rest of the pickled object if it is
longer, and its large tensors. Small tensors are pickled with the object, so that what is sent every
step takes one round, and the source doesn't wait for it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.tensors import strides

Kind: TypeAlias = Literal[
    "batch", "call", "output", "backward", "chain", "partition", "state", "seed"
]
_T = TypeVar("_T")
_KINDS: tuple[Kind, ...] = get_args(Kind)
_KIND_AND_LENGTH = struct.Struct("<qq")
_FRAME = 1 << 14  # bytes; a step's control message with the generators' states takes about 10,000
_SMALL = 1 << 13  # bytes up to which a tensor is pickled


class RemoteError(RuntimeError):
    """An error of another stage."""


class _Packer(pickle.Pickler):
    """Pickles an object, setting large tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        known = id(obj) in self._seen
        index = self._seen.setdefault(id(obj), len(self._seen))
        data = None
        if obj.device.type == "cpu" and obj.numel() * obj.element_size() <= _SMALL:
            data = strides.to_bytes(obj).numpy().tobytes()
        elif not known:
            self.tensors.append(obj)
        return index, data, obj.shape, obj.stride(), obj.dtype, obj.device.type


class _Unpacker(pickle.Unpickler):
    """The inverse; fetches the large tensors in the order in which they were packed."""

    def __init__(self, blob: bytes, fetch: Callable[[int, str], Tensor]) -> None:
        super().__init__(io.BytesIO(blob))
        self._fetch = fetch
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        index, data, shape, stride, dtype, device_type = pid
        if index not in self._tensors:
            if data is None:
                part = self._fetch(strides.byte_count(shape, stride, dtype), device_type)
            else:
                part = _tensor(data)
            self._tensors[index] = strides.from_bytes(part, shape, stride, dtype)
        return self._tensors[index]


@dataclass(frozen=True, slots=True)
class ObjectChannel:
    """The control channel of one pipeline.

    Args:
        stage: This rank's stage.
        ranks: Global rank of every stage.
        host: gloo group over the pipeline.
        data: Group over the pipeline for tensors on the device; the same as ``host`` where that
            can't reach it.
        device: The device of this rank.
    """

    stage: int
    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    data: dist.ProcessGroup
    device: torch.device
    _pending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def broadcast(self, kind: Kind, value: Any, source: int) -> Any:
        """Give every stage an object. Collective over the pipeline.

        Args:
            kind: What it is; must be the same on every stage.
            value: Any object that pickles; taken from the source alone. Tensors keep their strides.
                A tensor on the device arrives on the receiver's device, one on the host stays
                there.
            source: The stage that has it.

        Returns:
            The object itself on the source, a copy elsewhere.

        Raises:
            RuntimeError: If the source broadcast something else: the ranks don't run the same step.
        """
        if len(self.ranks) == 1:
            return value
        rank = self.ranks[source]
        if self.stage == source:
            blob, tensors = _pack(value)
            for part in _frames(kind, blob):
                self._post(part, rank, self.host)
            for tensor in tensors:
                wire, group = self._route(tensor.device.type)
                # a copy: the caller may change the tensor while it is under way
                self._post(strides.to_bytes(tensor).to(wire, copy=True), rank, group)
            return value

        def receive(data: Tensor, group: dist.ProcessGroup) -> Tensor:
            if data.numel():
                dist.broadcast(data, rank, group)
            return data

        def fetch(length: int, device_type: str) -> Tensor:
            wire, group = self._route(device_type)
            data = receive(torch.empty(length, dtype=torch.uint8, device=wire), group)
            return data if device_type == "cpu" else data.to(self.device)

        return self._unpack(kind, source, lambda data: receive(data, self.host), fetch)

    def decide(self, kind: Kind, decision: Callable[[], _T]) -> _T:
        """Let the first stage decide, and all know. Collective over the pipeline.

        Args:
            kind: What is decided.
            decision: Called on the first stage only.

        Raises:
            Exception: What ``decision`` raises; on the other stages a RuntimeError with its
                message.
        """
        if self.stage != 0:
            failed, value = self.broadcast(kind, None, source=0)
            if failed:
                raise RemoteError(f"Stage 0 (rank {self.ranks[0]}) failed: {value}")
            return cast(_T, value)
        try:
            result = decision()
        except Exception as error:
            self.broadcast(kind, (True, f"{type(error).__name__}: {error}"), source=0)
            raise
        self.broadcast(kind, (False, result), source=0)
        return result

    def send(self, kind: Kind, value: Any, to: int) -> None:
        """Send an object to one stage, through the host, and wait until it is gone.

        The other end must receive it.
        """
        blob, tensors = _pack(value)
        for part in (*_frames(kind, blob), *(strides.to_bytes(tensor).cpu() for tensor in tensors)):
            if part.numel():
                dist.send(part, self.ranks[to], self.host)

    def receive(self, kind: Kind, source: int) -> Any:
        """Receive what a stage sends with :meth:`send`; device tensors go to this rank's device.

        Raises:
            RuntimeError: If the source sent something else: the ranks don't run the same step.
        """

        def receive(data: Tensor) -> Tensor:
            if data.numel():
                dist.recv(data, self.ranks[source], self.host)
            return data

        def fetch(length: int, device_type: str) -> Tensor:
            data = receive(torch.empty(length, dtype=torch.uint8))
            return data if device_type == "cpu" else data.to(self.device)

        return self._unpack(kind, source, receive, fetch)

    def flush(self) -> None:
        """Wait until everything broadcast from here has arrived."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def _post(self, data: Tensor, rank: int, group: dist.ProcessGroup) -> None:
        """Broadcast from here without waiting for the others."""
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()[0].wait()  # raises what went wrong
        if data.numel():
            work = dist.broadcast(data, rank, group, async_op=True)
            if work is not None:
                self._pending.append((work, data))

    def _unpack(
        self,
        kind: Kind,
        source: int,
        receive: Callable[[Tensor], Tensor],
        fetch: Callable[[int, str], Tensor],
    ) -> Any:
        frame = receive(torch.empty(_FRAME, dtype=torch.uint8)).numpy().tobytes()
        code, length = _KIND_AND_LENGTH.unpack_from(frame)
        if _KINDS[code] != kind:
            raise RuntimeError(
                f"Stage {self.stage} (rank {self.ranks[self.stage]}) expected a message of kind"
                f" '{kind}' from stage {source} (rank {self.ranks[source]}), which sent"
                f" '{_KINDS[code]}': the stages do not run the same step. Call the model, the"
                " Trainer and its data loaders on every rank alike, never under `if rank == 0`."
            )
        blob = frame[_KIND_AND_LENGTH.size : _KIND_AND_LENGTH.size + length]
        if len(blob) < length:
            blob += receive(torch.empty(length - len(blob), dtype=torch.uint8)).numpy().tobytes()
        return _Unpacker(blob, fetch).load()

    def _route(self, device_type: str) -> tuple[torch.device, dist.ProcessGroup]:
        """Where a tensor travels: on the device if a group reaches it, else through the host."""
        if device_type == "cpu" or self.data is self.host:
            return torch.device("cpu"), self.host
        return self.device, self.data


def _frames(kind: Kind, blob: bytes) -> list[Tensor]:
    """A pickled object as a frame, and a second part if it is longer."""
    room = _FRAME - _KIND_AND_LENGTH.size
    frame = _KIND_AND_LENGTH.pack(_KINDS.index(kind), len(blob)) + blob[:room]
    return [
        _tensor(frame.ljust(_FRAME, b"\0")),
        *([_tensor(blob[room:])] if len(blob) > room else []),
    ]


def _tensor(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def _pack(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors
