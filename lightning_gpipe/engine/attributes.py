"""What layers keep in attributes, such as counters: a recompute must see that of its forward.

A warm-up that a layer counts itself, a temperature that it lowers, the state of a metric: these are
no buffers, and nothing tells that they change. So in a recompute those of the forward stand in
their places, and after it what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor, nn

from lightning_gpipe.model.layer_state import places_of
from lightning_gpipe.model.places import (
    CONTAINERS,
    FEW,
    NOTHING,
    Entries,
    Place,
    has_values,
    own_copy,
)

_PLAIN = (int, float, complex, str, bytes, type(None), Number, Enum, np.generic)


class _State(NamedTuple):
    """What stands in a place at one time.

    Args:
        values: What can be put back, by name, with tensors in memory of their own.
        names: Of all that stood there.
    """

    values: Entries
    names: frozenset[Any]


#: The state of each place.
States: TypeAlias = list[_State]


class LayerAttributes:
    """Keeps numbers, strings, flags and small tensors in attributes of layers for recomputes.

    Also those in their objects, in containers that hold nothing else, and in globals.

    Args:
        layers: The layers of the stage.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        places = {(id(p.value), p.key): p for layer in layers for p in places_of(layer)}
        self._places = [place for place in places.values() if _can_be_put_back(place)]

    def met(self) -> States:
        """What layers keep now, in memory of its own."""
        copies: dict[int, Any] = {}
        found = []
        for place in self._places:
            entries = place.entries()
            values = {name: v for name, v in entries.items() if _is_state(v)}
            if isinstance(place.value, CONTAINERS) and place.key is None:
                is_whole = len(values) == len(entries) <= FEW
                values = values if is_whole else {}
                if not is_whole:
                    found.append(_State({}, _LEFT))
                    continue
            found.append(_State(_own(values, copies), frozenset(entries)))
        return found

    @contextmanager
    def restored(self, met: States) -> Iterator[None]:
        """Let layers have what a forward has met, inside this context.

        Args:
            met: What :meth:`met` gave before it; it stays as it is.
        """
        before = [place.entries() for place in self._places]
        copies: dict[int, Any] = {}
        for place, state, entries in zip(self._places, met, before, strict=True):
            if state.names is not _LEFT:
                later = {n for n, v in entries.items() if n not in state.names and _is_state(v)}
                left = {name: v for name, v in entries.items() if name not in later}
                place.put_back(left | _own(state.values, copies))
        try:
            yield
        finally:
            for place, entries in zip(self._places, before, strict=True):
                place.put_back(entries)


_LEFT: frozenset[Any] = frozenset({"left as it is"})


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
    if isinstance(value, (Tensor, np.ndarray)):
        return has_values(value)
    if type(value) in (tuple, frozenset):
        return len(value) <= FEW and all(isinstance(one, _PLAIN) for one in value)
    return value is NOTHING or isinstance(value, _PLAIN)


def _own(values: Entries, copies: dict[int, Any]) -> Entries:
    """Values in memory of their own.

    Args:
        values: By name.
        copies: Of tensors and arrays, by their ``id``: what several places share is one again.
    """
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, (Tensor, np.ndarray)):
            if id(value) not in copies:
                copies[id(value)] = own_copy(value)
            found[name] = copies[id(value)]
    return found
