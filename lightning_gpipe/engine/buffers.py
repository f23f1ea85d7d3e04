"""What layers do to their buffers: a recompute must see those of its forward, and leave no trace.

Codebooks by moving average, spectral norm and the like read buffers that they change. Most buffers
are constants, some of them large, and nobody says which. So once a call all are copied, and after a
micro-batch it is looked at which ones moved: by identity, by version, and, because ``.data`` and
some kernels change a buffer without either, by value. Those are copied for every micro-batch from
then on, all others never again in the call.

The running statistics of batch norm are not looked at here; see
:mod:`lightning_gpipe.engine.batchnorm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import version_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_CLOSE_LOOKS = 2  # calls in which values are compared after every micro-batch
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Place(NamedTuple):
    """Where a buffer is registered."""

    module: nn.Module
    name: str

    @property
    def buffer(self) -> Tensor | None:
        """What stands there now."""
        return self.module._buffers.get(self.name)


@dataclass(slots=True)
class CallBuffers:
    """The buffers of one call of the backbone.

    Args:
        before: Each buffer as it was when the call began, in memory of its own.
        known: What stood in its place then, and its version.
        of: For each micro-batch those buffers that move, as its forward met them.
        moved: The buffers that moved in this call.
    """

    before: dict[_Place, Tensor | None]
    known: dict[_Place, tuple[Tensor | None, int]]
    of: dict[int, dict[_Place, Tensor | None]] = field(default_factory=dict)
    moved: set[_Place] = field(default_factory=set)


class LayerBuffers:
    """Keeps the buffers of a stage's layers for its recomputes.

    Args:
        modules: The modules of the stage, each once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._moving: set[_Place] = set()
        self._silent: set[_Place] = set()  # moved without a trace: how often isn't known
        self._looks: dict[tuple[bool, ...], int] = {}

    def begin(self, modes: tuple[bool, ...]) -> CallBuffers | None:
        """Begin a call; None: no layer has a buffer, or there will be no backward.

        Args:
            modes: Which of the modules are in training: others may change other buffers.
        """
        places = list(self._places())
        if not places or not torch.is_grad_enabled():
            return None
        self._looks[modes] = self._looks.get(modes, 0) + 1
        return CallBuffers(_copies(places), {place: _mark(place.buffer) for place in places})

    def forward(
        self,
        call: CallBuffers | None,
        modes: tuple[bool, ...],
        m: int,
        micro_batches: int,
        keep_graph: bool,
    ) -> AbstractContextManager[None]:
        """Run a micro-batch's forward inside this context.

        Args:
            call: The call.
            modes: Which of the modules are in training.
            m: The micro-batch.
            micro_batches: M.
            keep_graph: Whether the graph of the forward is kept: then it keeps what moves, and the
                next micro-batch gets a copy.

        Raises:
            RuntimeError: If a layer begins to change a buffer without a trace when it is too late
                to know which values the micro-batches met.
        """
        if call is None:
            return nullcontext()
        return self._forward(call, modes, m, micro_batches, keep_graph)

    @contextmanager
    def _forward(
        self,
        call: CallBuffers,
        modes: tuple[bool, ...],
        m: int,
        micro_batches: int,
        keep_graph: bool,
    ) -> Iterator[None]:
        met = _copies(self._moving)
        if keep_graph:
            _install(met)
        else:
            call.of[m] = met
        marks = {place: _mark(place.buffer) for place in met}
        yield
        close, is_last = self._looks[modes] <= _CLOSE_LOOKS, m == micro_batches - 1
        found = self._newly_moved(call)
        silent = self._silently_moved(call, found) if close or is_last else set()
        if silent and not close and micro_batches > 1:
            place = next(place for place in call.known if place in silent)
            raise RuntimeError(
                f"The buffer '{place.name}' of {type(place.module).__name__} was changed without a"
                " trace (through .data, or by a kernel that doesn't tell), in a later step than the"
                " first ones. So it isn't known which values the earlier micro-batches met. Change"
                " it in place under torch.no_grad(), or assign a new tensor; or use chunks=1."
            )
        if silent:  # what changes one buffer of a module so may change its others in a later step
            modules = {place.module for place in silent}
            silent.update(place for place in self._places() if place.module in modules)
        found |= silent
        if keep_graph:  # its graph keeps these: the next micro-batch gets copies
            _install(_copies(found))
        call.moved.update(found, (place for place in met if _is_other(place, marks[place])))
        self._silent |= silent
        self._moving |= found
        if is_last:  # such as a table that was made once
            self._moving &= call.moved | self._silent

    def recompute(
        self, call: CallBuffers | None, m: int, once_more: bool
    ) -> AbstractContextManager[None]:
        """Run a micro-batch's recompute inside this context.

        Args:
            call: The call.
            m: The micro-batch.
            once_more: Whether it will be recomputed again.
        """
        return nullcontext() if call is None else self._recompute(call, m, once_more)

    @contextmanager
    def _recompute(self, call: CallBuffers, m: int, once_more: bool) -> Iterator[None]:
        kept = [(module, dict(module._buffers)) for module in self._modules]
        met = call.of.get(m, {}) if once_more else call.of.pop(m, {})
        copies: dict[int, Tensor] = {}
        for place in dict.fromkeys((*call.before, *call.moved)):
            if place not in met and place not in call.before:  # not made yet
                place.module._buffers.pop(place.name, None)
                continue
            value = met[place] if place in met else call.before[place]
            if place in call.moved and (once_more or place not in met):
                value = _copy(value, copies)
            place.module._buffers[place.name] = value
        try:
            yield
        finally:
            for module, buffers in kept:
                module._buffers.clear()
                module._buffers.update(buffers)

    def _places(self) -> Iterator[_Place]:
        for module in self._modules:
            for name in module._buffers:
                if not isinstance(module, _NormBase) or name not in _STATISTICS:
                    yield _Place(module, name)

    def _newly_moved(self, call: CallBuffers) -> set[_Place]:
        """Buffers not known to move that were made, replaced or changed in place in a call."""
        made = {place for place in self._places() if place not in call.known}
        others = {place for place, mark in call.known.items() if _is_other(place, mark)}
        return (made | others) - self._moving

    def _silently_moved(self, call: CallBuffers, found: set[_Place]) -> set[_Place]:
        """Other buffers that have other values than when the call began."""
        pairs = [
            (place, place.buffer, before)
            for place, before in call.before.items()
            if place not in self._moving and place not in found
        ]
        marks = [
            (place, _differ(buffer, before))
            for place, buffer, before in pairs
            if buffer is not None and before is not None
        ]
        by_device: dict[torch.device, list[tuple[_Place, Tensor]]] = {}
        for place, mark in marks:
            by_device.setdefault(mark.device, []).append((place, mark))
        return {
            place
            for group in by_device.values()
            for (place, _), differs in zip(
                group, torch.stack([mark for _, mark in group]).tolist(), strict=True
            )
            if differs
        }


def _mark(tensor: Tensor | None) -> tuple[Tensor | None, int]:
    """What tells that a tensor was replaced or changed in place."""
    return tensor, 0 if tensor is None else version_of(tensor)


def _is_other(place: _Place, mark: tuple[Tensor | None, int]) -> bool:
    """Whether something else stands in a place than did, or the same one with other contents."""
    tensor, version = _mark(place.buffer)
    return tensor is not mark[0] or version != mark[1]


def _copies(places: Iterable[_Place]) -> dict[_Place, Tensor | None]:
    copies: dict[int, Tensor] = {}
    return {place: _copy(place.buffer, copies) for place in places}


def _install(buffers: dict[_Place, Tensor | None]) -> None:
    for place, buffer in buffers.items():
        place.module._buffers[place.name] = buffer


def _copy(tensor: Tensor | None, copies: dict[int, Tensor]) -> Tensor | None:
    with torch.no_grad():
        return strides.copy_once(tensor, copies) if tensor is not None else None


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether the bits of two tensors of one type differ, without waiting for the device."""
    if one.dtype.itemsize in _AS_BITS:  # NaN equals itself
        bits = _AS_BITS[one.dtype.itemsize]
        one, other = one.detach().view(bits), other.view(bits)
    return torch.ne(one, other).any()
