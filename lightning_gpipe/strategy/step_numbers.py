"""Marks the numbers that a step computes with, which must be the same on every stage.

Each stage runs the user's step, and of what it computes another one may take the rest. A generator
without a seed, the time or the order of a set may give each of them other numbers. So it is marked
how the backbone's input is made, and what meets its output, or what requires a gradient.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.redirect import is_transforming
from lightning_gpipe.model.remote import told
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.random_state import packed

_FEW, _BYTES = 1 << 12, 1 << 24
#: Functions whose numbers may tell of a stage's device.
_OF_DEVICES = {"to", "cuda"}


class StepNumbers:
    """Follows a step; see :data:`step_trace.Follow`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}  # marks, by id

    def clear(self) -> None:
        """Forget the step."""
        self._known.clear()

    def follow(self, trace: StepTrace, ran: Ran) -> None:
        """Note what a function, or the backbone, is given."""
        if is_transforming():  # its tensors have no memory
            return
        marks = [self._mark_of(trace, tensor) for tensor in ran.given]
        known = [mark for mark in marks if mark is not None]
        kwargs = {name: value for name, value in ran.kwargs.items() if name != "device"}
        numbers = [] if ran.name in _OF_DEVICES else [*_numbers((ran.args, kwargs))]
        if isinstance(generator := ran.kwargs.get("generator"), torch.Generator):
            numbers.append(str(zlib.crc32(packed(generator))))
        mark = zlib.crc32(repr((known, numbers)).encode())
        is_apart = len(known) == len(marks) and ran.function is not None
        if not is_apart and (known or numbers):
            trace.numbers = zlib.crc32(str(mark).encode(), trace.numbers)
        # parameters and buffers, which may be moved to other stages, must have no weak references
        changed = [t for t in ran.given[:1] if not ran.is_free and self._find(t) is not None]
        new = [t for t in ran.made if all(t is not other for other in ran.given)]
        for tensor in (*changed, *new):
            self._known[id(tensor)] = weakref.ref(tensor), mark if is_apart else None

    def _find(self, tensor: Tensor) -> tuple[weakref.ref[Tensor], int | None] | None:
        found = self._known.get(id(tensor))
        return found if found is not None and found[0]() is tensor else None

    def _mark_of(self, trace: StepTrace, tensor: Tensor) -> int | None:
        """What tells a tensor from others that all stages compute by themselves; None: it is none.

        That of what the step hasn't made is of its bits, where these are in host memory.
        """
        if (found := self._find(tensor)) is not None:
            return found[1]
        is_own = trace.where(tensor) is None and not tensor.requires_grad
        is_own = is_own and type(tensor) is not nn.Parameter
        return _mark_of_bits(told(tensor)) if is_own else None


def _mark_of_bits(tensor: Tensor) -> int:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if tensor.is_nested or tensor.is_quantized:
        return 0
    if not is_plain or tensor.device.type != "cpu" or tensor.nbytes > _BYTES:
        return 0
    with torch._C.DisableTorchFunction():  # the step doesn't call this
        return zlib.crc32(strides.to_bytes(tensor).numpy().tobytes())


def _numbers(value: Any) -> Iterator[str]:
    """The numbers in arguments, floats as far as devices of different kinds compute them alike."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        yield f"{value:.4g}"
    elif isinstance(value, int):
        yield str(int(value))
    elif isinstance(value, np.ndarray):
        if value.size <= _FEW and not value.dtype.hasobject:
            yield str(zlib.crc32(value.tobytes()))
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, Mapping):
        yield from _numbers([*value.values()])
    elif isinstance(value, (list, tuple)):
        for item in islice(value, _FEW):
            yield from _numbers(item)
