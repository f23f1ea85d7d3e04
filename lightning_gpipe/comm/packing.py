"""An object as bytes and large tensors, and back.

Small tensors in host memory are pickled with the object, so that what is sent every step takes one
message. Large ones, and those of the device, are set aside: they travel by themselves.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.overlaps import Overlaps

#: What is looked at in the memory of who sends it; in the place of a device's type.
SHARED = "shared"
FRAME = 1 << 12  # bytes; as much as goes from process to process at once, see nearby.py
_SMALL = 1 << 13  # bytes up to which a tensor is pickled
_KIND_AND_LENGTH = struct.Struct("<qq")
_ROOM = FRAME - _KIND_AND_LENGTH.size


def pack(
    value: Any,
    pickles_small: bool,
    shared_from: float = math.inf,
    keeps_overlaps: bool = False,
) -> tuple[bytes, list[Tensor]]:
    """Pickle an object.

    Args:
        value: Any object that pickles.
        pickles_small: Whether small tensors in host memory are pickled.
        shared_from: Bytes from which tensors in host memory are looked at where they are.
        keeps_overlaps: Whether tensors that have memory in common have it on the other side, too.

    Returns:
        The pickled object, and the tensors that travel by themselves, in order.
    """
    overlaps = Overlaps()

    def packed() -> tuple[bytes, list[Tensor]]:
        file = io.BytesIO()
        packer = _Packer(file, pickles_small, shared_from, overlaps)
        packer.dump(value)
        return file.getvalue(), packer.tensors

    found = packed()
    return packed() if keeps_overlaps and overlaps.find() else found


def unpack(blob: bytes, fetch: Callable[[int, str], Tensor]) -> Any:
    """The inverse of :func:`pack`.

    Args:
        blob: The pickled object.
        fetch: Called for every tensor that was set aside, in order, with its length in bytes and
            the type of the device that it was on, or :data:`SHARED`; returns its bytes.
    """
    return _Unpacker(blob, fetch).load()


def frames(code: int, blob: bytes) -> list[Tensor]:
    """A pickled object as messages: a frame of fixed size, and the rest if it is longer.

    Args:
        code: A number that says what it is.
        blob: The pickled object.
    """
    frame = _KIND_AND_LENGTH.pack(code, len(blob)) + blob[:_ROOM]
    first = from_buffer(frame.ljust(FRAME, b"\0"))
    return [first, from_buffer(blob[_ROOM:])] if len(blob) > _ROOM else [first]


def open_frame(frame: Tensor) -> tuple[int, bytes, int]:
    """What :func:`frames` put into the first message.

    Returns:
        The number, the first part of the pickled object, and how many bytes are missing.
    """
    data = frame.numpy().tobytes()
    code, length = _KIND_AND_LENGTH.unpack_from(data)
    blob = data[_KIND_AND_LENGTH.size : _KIND_AND_LENGTH.size + length]
    return code, blob, length - len(blob)


def from_buffer(data: bytes) -> Tensor:
    """Bytes as a ``uint8`` tensor ``[bytes]`` in host memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else host_buffer(0)


def host_buffer(length: int) -> Tensor:
    """Room for bytes in host memory, whatever the default device."""
    return torch.empty(length, dtype=torch.uint8, device="cpu")


class _Packer(pickle.Pickler):
    """Pickles an object, setting large tensors aside."""

    def __init__(
        self, file: io.BytesIO, pickles_small: bool, shared_from: float, overlaps: Overlaps
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._overlaps = overlaps
        self._pickles_small, self._shared_from = pickles_small, shared_from
        self._seen: dict[int, tuple[int, Tensor]] = {}  # by id, which a tensor kept here holds

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not strides.is_plain(obj):
            return None
        found = self._overlaps.piece_of(obj)
        if found is not None:
            memory, place = found
            return *self._told(memory), (obj.shape, obj.stride(), obj.dtype, place)
        return *self._told(obj), None

    def _told(self, obj: Tensor) -> tuple[Any, ...]:
        """What stands for a tensor that is sent."""
        known = id(obj) in self._seen
        index, _ = self._seen.setdefault(id(obj), (len(self._seen), obj))
        data, kind = None, obj.device.type
        nbytes = strides.byte_count(obj.shape, obj.stride(), obj.dtype)
        if kind == "cpu" and nbytes >= self._shared_from:
            kind = SHARED
        if self._pickles_small and kind == "cpu" and nbytes <= _SMALL:
            data = strides.to_bytes(obj).numpy().tobytes()
        elif not known:
            self.tensors.append(obj)
        return index, data, obj.shape, obj.stride(), obj.dtype, kind

    def reducer_override(self, obj: Any) -> Any:
        """Take a subclass's values out of it: pickled, they would come back on a fixed device."""
        if (
            not isinstance(obj, Tensor)
            or type(obj) is Tensor  # sparse, say
            or type(obj).__reduce_ex__ is not Tensor.__reduce_ex__
            or type(obj).__torch_dispatch__ is not Tensor.__torch_dispatch__
        ):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return _subclassed, (type(obj), obj.detach().as_subclass(Tensor), vars(obj))


def _subclassed(kind: type[Tensor], values: Tensor, attributes: dict[str, Any]) -> Tensor:
    tensor = values.as_subclass(kind)
    vars(tensor).update(attributes)
    return tensor


class _Unpacker(pickle.Unpickler):
    """The inverse; fetches the large tensors in the order in which they were packed."""

    def __init__(self, blob: bytes, fetch: Callable[[int, str], Tensor]) -> None:
        super().__init__(io.BytesIO(blob))
        self._fetch = fetch
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, pid: Sequence[Any]) -> Tensor:
        index, data, shape, stride, dtype, where, piece = pid
        if index not in self._tensors:
            if data is None:
                part = self._fetch(strides.byte_count(shape, stride, dtype), where)
            else:
                part = from_buffer(data)
            self._tensors[index] = strides.from_bytes(part, shape, stride, dtype)
        found = self._tensors[index]
        return found if piece is None else _piece(found, *piece)


def _piece(memory: Tensor, shape: Any, stride: Any, dtype: torch.dtype, place: int) -> Tensor:
    """A tensor in memory that others have, too."""
    made = torch.empty(0, dtype=dtype, device=memory.device)
    start = (memory.storage_offset() + place) // dtype.itemsize
    return made.set_(memory.untyped_storage(), start, shape, stride)
