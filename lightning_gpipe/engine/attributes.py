"""What layers keep in attributes, such as counters: a recompute must see that of its forward.

A warm-up that a layer counts itself, a temperature that it lowers, the state of a metric, a
function that a step gives it for one call: these are no buffers, and nothing tells that they
change. So in a recompute those of the forward stand in their places, and after it what was there
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gpipe.model.layer_state import places_of
from lightning_gpipe.model.places import (
    CONTAINERS,
    FEW,
    NOTHING,
    Entries,
    Place,
    has_values,
    is_frozen,
    own_copy,
)
from lightning_gpipe.model.snapshot import Snapshot

_PLAIN = (
    *(int, float, complex, str, bytes, type(None), Number, Enum, np.generic, slice, range),
    *(torch.dtype, torch.device, type, BuiltinFunctionType),
)
#: They may hold tensors.
_FUNCTIONS = (partial, FunctionType, MethodType)


class _State(NamedTuple):
    """What stands in a place at one time.

    Args:
        values: What can be put back, by name, with tensors in memory of their own.
        names: Of all that stood there; None: nothing is put back.
        is_fixed: Whether no value can change by itself.
        functions: Names of functions, which may hold tensors.
        snapshot: Tells whether the same stands there still, where that takes less time.
    """

    values: Entries
    names: frozenset[Any] | None
    is_fixed: bool
    functions: tuple[Any, ...] = ()
    snapshot: Snapshot | None = None

    def is_now(self, entries: Entries) -> bool:
        """Whether the same stands there still."""
        if not self.is_fixed or self.names is None or len(entries) != len(self.names):
            return False
        for name, value in entries.items():
            if name in self.values:
                if self.values[name] is not value:
                    return False
            elif name not in self.names or _is_state(value):
                return False
        return True


#: The state of each place.
States: TypeAlias = list[_State]
_LEFT = _State({}, None, False)


class LayerAttributes:
    """Keeps numbers, strings, functions and small tensors in attributes of layers for recomputes.

    Also those in their objects, in containers that hold nothing else, and in globals.

    Args:
        layers: The layers of the stage.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        places = {(id(p.value), p.key): p for layer in layers for p in places_of(layer)}
        self._places = [place for place in places.values() if _can_be_put_back(place)]
        self._last: States = [_LEFT for _ in self._places]

    def met(self) -> States:
        """What layers keep now, in memory of its own."""
        copies: dict[int, Any] = {}
        pairs = zip(self._places, self._last, strict=True)
        self._last = [_state_of(place, last, copies) for place, last in pairs]
        return self._last

    def kept(self, met: States) -> States:
        """The same without functions that a forward has replaced: they may hold what it computed.

        Args:
            met: What :meth:`met` gave before it.
        """
        if not any(state.functions for state in met):
            return met
        return [_kept(place, state) for place, state in zip(self._places, met, strict=True)]

    @contextmanager
    def restored(self, met: States) -> Iterator[None]:
        """Let layers have what a forward has met, inside this context.

        Args:
            met: What :meth:`kept` gave behind it; it stays as it is.
        """
        before: list[tuple[Place, Snapshot | None, Any]] = []
        copies: dict[int, Any] = {}
        for place, state in zip(self._places, met, strict=True):
            if state.names is None:
                continue
            if (snapshot := state.snapshot) is not None:
                values = snapshot.values()
                if snapshot.is_same(values):
                    before.append((place, snapshot, values))
                    continue
            if place.is_large:
                continue
            entries = place.entries()
            before.append((place, None, entries))
            if not state.is_now(entries):
                later = {n for n, v in entries.items() if n not in state.names and _is_state(v)}
                left = {name: v for name, v in entries.items() if name not in later}
                place.put_back(left | _own(state.values, copies))
        try:
            yield
        finally:
            for place, snapshot, found in before:
                if snapshot is None:
                    place.put_back(found)
                elif not snapshot.is_still(found):
                    place.put_back(dict(zip(snapshot.names, found, strict=True)))


def _state_of(place: Place, last: _State, copies: dict[int, Any]) -> _State:
    """What stands in a place now; the last state, if that is the same."""
    snapshot = last.snapshot
    if snapshot is not None and snapshot.is_same(snapshot.values()):
        return last
    if place.is_large:
        return _LEFT
    entries = place.entries()
    if last.is_now(entries):
        return last
    values = {name: value for name, value in entries.items() if _is_state(value)}
    is_container = place.key is None and isinstance(place.value, CONTAINERS)
    if is_container and len(values) < len(entries):
        return _LEFT._replace(snapshot=Snapshot.of(place, entries, {}))
    is_fixed = not any(map(_has_tensors, values.values()))
    is_class = isinstance(place.value, type)  # whose methods stay
    functions = () if is_class else tuple(n for n, v in values.items() if _may_hold(v))
    snapshot = Snapshot.of(place, entries, values) if is_fixed else None
    return _State(_own(values, copies), frozenset(entries), is_fixed, functions, snapshot)


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, FunctionType):
        return value.__closure__ is not None
    return issubclass(kind, (partial, MethodType))


def _kept(place: Place, state: _State) -> _State:
    if not state.functions:
        return state
    now = place.entries()
    gone = {name for name in state.functions if now.get(name) is not state.values[name]}
    if not gone:
        return state
    values = {name: v for name, v in state.values.items() if name not in gone}
    return state._replace(values=values, snapshot=None)


def _can_be_put_back(place: Place) -> bool:
    """Whether a recompute may find a place as the forward did."""
    if isinstance(place.value, nn.Module):
        return not _is_torchs(place.value)  # which keep no such state
    return not isinstance(place.value, (Tensor, np.ndarray))  # others hold them


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is of PyTorch's own classes alone."""
    kinds = type(module).__mro__[:-1]
    return all(kind.__module__.partition(".")[0] == "torch" for kind in kinds)


def _is_state(value: Any) -> bool:
    kind = type(value)  # a proxy claims to be of another class, or fails to tell
    if _is_plain(kind) or value is NOTHING:
        return True
    if kind is tuple:  # such as the state of an LSTM
        return len(value) <= FEW and all(_is_plain(type(one)) or _is_array(one) for one in value)
    if issubclass(kind, (tuple, frozenset)):
        return len(value) <= FEW and all(_is_plain(type(one)) for one in value)
    if is_frozen(kind):
        return all(_is_plain(type(getattr(value, each.name, None))) for each in fields(kind))
    return _is_array(value)


def _is_array(value: Any) -> bool:
    """Whether it is a tensor or an array that can be kept."""
    return issubclass(type(value), (Tensor, np.ndarray)) and has_values(value)


def _has_tensors(value: Any) -> bool:
    """Whether it is a tensor or an array, or a tuple that holds some."""
    parts = value if type(value) is tuple else (value,)
    return any(issubclass(type(part), (Tensor, np.ndarray)) for part in parts)


def _is_plain(kind: Any) -> bool:
    found = _known.get(kind)
    if found is None:  # an abstract class takes long to tell
        found = _known[kind] = issubclass(kind, (*_PLAIN, *_FUNCTIONS))
    return found


_known: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _own(values: Entries, copies: dict[int, Any]) -> Entries:
    """Values in memory of their own.

    Args:
        values: By name.
        copies: Of tensors and arrays, by their ``id``: what several places share is one again.
    """

    def own(value: Any) -> Any:
        if type(value) is tuple and _has_tensors(value):
            return tuple(map(own, value))
        if issubclass(type(value), (Tensor, np.ndarray)):
            if id(value) not in copies:
                copies[id(value)] = own_copy(value)
            return copies[id(value)]
        return value

    return {name: own(value) for name, value in values.items()}
