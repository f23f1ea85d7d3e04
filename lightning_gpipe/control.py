"""Objects between the stages of one pipeline: batches, outputs, decisions, state.

Every message says what it is, so that ranks that don't run the same step get an error instead of each other's data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe import layout

Kind: TypeAlias = Literal["batch", "output", "backward", "chain", "partition", "state", "seed"]
_T = TypeVar("_T")
_KINDS: tuple[Kind, ...] = get_args(Kind)


class _Packer(pickle.Pickler):
    """Pickles an object, setting its tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        index = self._seen[id(obj)]
        return index, obj.shape, obj.stride(), obj.dtype, obj.device.type


class _Unpacker(pickle.Unpickler):
    """The inverse; fetches each tensor where the object first needs it, which is the order in which they were packed."""

    def __init__(self, file: io.BytesIO, fetch: Any) -> None:
        super().__init__(file)
        self._fetch = fetch
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        index, *kind = pid
        if index not in self._tensors:
            self._tensors[index] = self._fetch(*kind)
        return self._tensors[index]


@dataclass(frozen=True, slots=True)
class Control:
    """The control channel of one pipeline.

    Args:
        stage: This rank's stage.
        ranks: Global rank of every stage.
        host: gloo group over the pipeline.
        data: Group over the pipeline for tensors on the device; the same as ``host`` where that can't reach it.
        device: The device of this rank.
    """

    stage: int
    ranks: tuple[int, ...]
    host: dist.ProcessGroup
    data: dist.ProcessGroup
    device: torch.device

    def broadcast(self, kind: Kind, value: Any, source: int) -> Any:
        """Give every stage an object. Collective over the pipeline.

        Args:
            kind: What it is; must be the same on every stage.
            value: Any object that pickles; taken from the source alone. Tensors keep their strides. A tensor on the
                device arrives on the receiver's device, one on the host stays there.
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
            dist.broadcast(torch.tensor([_KINDS.index(kind), len(blob)]), rank, self.host)
            dist.broadcast(torch.frombuffer(bytearray(blob), dtype=torch.uint8), rank, self.host)
            for tensor in tensors:
                wire, group = self._route(tensor.device.type)
                data = layout.to_bytes(tensor).to(wire)
                if data.numel():
                    dist.broadcast(data, rank, group)
            return value

        def fetch(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device_type: str) -> Tensor:
            wire, group = self._route(device_type)
            data = torch.empty(layout.byte_count(shape, stride, dtype), dtype=torch.uint8, device=wire)
            if data.numel():
                dist.broadcast(data, rank, group)
            return layout.from_bytes(self._home(data, device_type), shape, stride, dtype)

        header = torch.empty(2, dtype=torch.int64)
        dist.broadcast(header, rank, self.host)
        blob_length = self._check(header, kind, source)
        received = torch.empty(blob_length, dtype=torch.uint8)
        dist.broadcast(received, rank, self.host)
        return _Unpacker(io.BytesIO(received.numpy().tobytes()), fetch).load()

    def decide(self, kind: Kind, decision: Callable[[], _T]) -> _T:
        """Let the first stage decide, and all know. Collective over the pipeline.

        Args:
            kind: What is decided.
            decision: Called on the first stage only.

        Raises:
            Exception: What ``decision`` raises; on the other stages a RuntimeError with its message.
        """
        if self.stage != 0:
            failed, value = self.broadcast(kind, None, source=0)
            if failed:
                raise RuntimeError(f"Stage 0 (rank {self.ranks[0]}) failed: {value}")
            return cast(_T, value)
        try:
            result = decision()
        except Exception as error:
            self.broadcast(kind, (True, f"{type(error).__name__}: {error}"), source=0)
            raise
        self.broadcast(kind, (False, result), source=0)
        return result

    def send(self, kind: Kind, value: Any, to: int) -> None:
        """Send an object to one stage, through the host, and wait until it is gone. The other end must receive it."""
        blob, tensors = _pack(value)
        rank = self.ranks[to]
        dist.send(torch.tensor([_KINDS.index(kind), len(blob)]), rank, self.host)
        dist.send(torch.frombuffer(bytearray(blob), dtype=torch.uint8), rank, self.host)
        for tensor in tensors:
            data = layout.to_bytes(tensor).cpu()
            if data.numel():
                dist.send(data, rank, self.host)

    def receive(self, kind: Kind, source: int) -> Any:
        """Receive what a stage sends with :meth:`send`. Tensors from a device arrive on this rank's device.

        Raises:
            RuntimeError: If the source sent something else: the ranks don't run the same step.
        """
        rank = self.ranks[source]

        def fetch(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device_type: str) -> Tensor:
            data = torch.empty(layout.byte_count(shape, stride, dtype), dtype=torch.uint8)
            if data.numel():
                dist.recv(data, rank, self.host)
            return layout.from_bytes(self._home(data, device_type), shape, stride, dtype)

        header = torch.empty(2, dtype=torch.int64)
        dist.recv(header, rank, self.host)
        received = torch.empty(self._check(header, kind, source), dtype=torch.uint8)
        dist.recv(received, rank, self.host)
        return _Unpacker(io.BytesIO(received.numpy().tobytes()), fetch).load()

    def _route(self, device_type: str) -> tuple[torch.device, dist.ProcessGroup]:
        """Where a tensor travels: on the device if a group reaches it, else through the host."""
        if device_type == "cpu" or self.data is self.host:
            return torch.device("cpu"), self.host
        return self.device, self.data

    def _home(self, data: Tensor, device_type: str) -> Tensor:
        return data if device_type == "cpu" else data.to(self.device)

    def _check(self, header: Tensor, kind: Kind, source: int) -> int:
        """Check a message's kind; returns the length of what follows, in bytes."""
        code, length = header.tolist()
        if _KINDS[code] != kind:
            raise RuntimeError(
                f"Stage {self.stage} (rank {self.ranks[self.stage]}) expected a message of kind '{kind}' from stage"
                f" {source} (rank {self.ranks[source]}), which sent '{_KINDS[code]}': the stages do not run the same"
                " step. Call the model and the Trainer on every rank alike, never under `if rank == 0`."
            )
        return int(length)


def _pack(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.tensors
