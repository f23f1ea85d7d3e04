"""A header and small tensors in one stretch of host memory, so that they take one message."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from lightning_gpipe.comm.mail import Work
from lightning_gpipe.comm.nearby import Transfer
from lightning_gpipe.comm.packing import host_buffer
from lightning_gpipe.comm.signature import TensorType
from lightning_gpipe.comm.waiting import waiting
from lightning_gpipe.tensors import strides

_HEAD = struct.Struct("<3q")
_LAYOUTS = 16
_ALIGNED = 64  # bytes; a tensor's memory begins at a multiple of them


@dataclass(slots=True)
class PacketLayout:
    """What a packet holds beside its header.

    Args:
        kinds: The types of its tensors.
        plain: For each whether its memory there is its values and nothing else.
        starts: Where each begins.
        length: Of all, with the header.
        nbytes: Of the tensors.
    """

    kinds: tuple[TensorType, ...]
    plain: tuple[bool, ...] = field(init=False)
    starts: list[int] = field(init=False)
    length: int = field(init=False)
    nbytes: int = field(init=False)
    _free: list[Packet] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain = tuple(map(_is_plain, self.kinds))
        self.nbytes = sum(kind.nbytes for kind in self.kinds)
        lengths = [-(-kind.nbytes // _ALIGNED) * _ALIGNED for kind in self.kinds]
        *self.starts, self.length = accumulate(lengths, initial=_ALIGNED)

    def packet(self) -> Packet:
        """A packet to fill and to send; :meth:`give_back` it when it has arrived."""
        return self._free.pop() if self._free else Packet(self)

    def give_back(self, packet: Packet) -> None:
        """Use a packet's memory again."""
        self._free.append(packet)


class Packet:
    """A header and tensors.

    Args:
        layout: Which tensors.
    """

    __slots__ = ("_head", "_parts", "buffer", "layout")

    def __init__(self, layout: PacketLayout) -> None:
        self.layout = layout
        # it may be used again where there are gradients
        inferring = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inferring else nullcontext():
            #: What is sent, ``uint8``.
            self.buffer = buffer = host_buffer(layout.length)
            self._parts = [
                _part(buffer, start, kind, plain)
                for start, kind, plain in zip(
                    layout.starts, layout.kinds, layout.plain, strict=True
                )
            ]
        self._head = memoryview(buffer.numpy().data)[: _HEAD.size]

    def write(self, training: bool, m: int, announced: int) -> None:
        """Write the header.

        Args:
            training: Whether the call trains.
            m: The micro-batch.
            announced: Bytes of a new signature.
        """
        self._head[:] = _HEAD.pack(training, m, announced)

    def read(self) -> tuple[bool, int, int]:
        """What was written."""
        training, m, announced = _HEAD.unpack(self._head)
        return bool(training), m, announced

    def fill(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of tensors into it that have no graph."""
        for plain, part, tensor in zip(self.layout.plain, self._parts, tensors, strict=True):
            part.copy_(tensor if plain else strides.to_bytes(tensor))

    def tensors(self, device: torch.device) -> list[Tensor]:
        """The tensors: one by itself in the packet's memory, several each in its own.

        Else one that a layer resizes could grow into another, and one that is kept would keep all.

        Args:
            device: Where those go that came from a device.
        """
        if self.layout.plain == (True,):
            return self._parts
        found = []
        for kind, plain, part in zip(
            self.layout.kinds, self.layout.plain, self._parts, strict=True
        ):
            if plain:
                found.append(strides.copy(part))
                continue
            data = part.to(device) if kind.device_type == device.type else part.clone()
            found.append(strides.from_bytes(data, kind.shape, kind.stride, kind.dtype))
        return found


class PacketLayouts(dict[tuple[TensorType, ...], PacketLayout]):
    """The layouts that a link uses, by the types of their tensors."""

    def __missing__(self, kinds: tuple[TensorType, ...]) -> PacketLayout:
        if len(self) >= _LAYOUTS:  # where every step has other lengths: those in use stay alive
            self.clear()
        layout = self[kinds] = PacketLayout(kinds)
        return layout


@dataclass(slots=True)
class Sent:
    """A message that may be under way.

    Args:
        number: Counts the boundaries that were sent.
        data: Its memory; None: it was copied.
        work: Its send.
    """

    number: int
    data: Packet | Tensor | None
    work: Work

    def wait(self) -> None:
        """Wait until its memory isn't needed any more."""
        wait_for(self.work)
        if isinstance(self.data, Packet):
            self.data.layout.give_back(self.data)


def wait_for(work: Work | None) -> None:
    """Wait for a message; None: there is nothing to wait for."""
    if isinstance(work, Transfer):  # what it does itself isn't waiting
        work.wait()
    elif work is not None:
        with waiting:
            work.wait()


def _is_plain(kind: TensorType) -> bool:
    """Whether a tensor's memory in host memory is its values and nothing else."""
    is_expanded = kind.nbytes != kind.shape.numel() * kind.dtype.itemsize
    dense = strides.is_dense(kind.shape, kind.stride)
    return kind.device_type == "cpu" and dense and not is_expanded


def _part(buffer: Tensor, start: int, kind: TensorType, plain: bool) -> Tensor:
    """A stretch of a buffer as a tensor that is no view: changed in place it tells no other."""
    storage = buffer.untyped_storage()
    if plain:
        place = start // kind.dtype.itemsize
        part = torch.empty(0, dtype=kind.dtype, device="cpu")
        return part.set_(storage, place, kind.shape, kind.stride)
    part = torch.empty(0, dtype=torch.uint8, device="cpu")
    return part.set_(storage, start, (kind.nbytes,), (1,))
