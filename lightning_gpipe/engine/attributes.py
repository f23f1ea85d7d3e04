"""What layers keep in attributes, such as counters: a recompute must see that of its forward.

A warm-up that a layer counts itself, a temperature that it lowers, the state of a metric: these are
no buffers, and nothing tells that they change. So in a recompute those of the forward stand in
their places, and after it what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_gpipe.model.layer_state import places_of

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
#: Elements of a tensor up to which it may be such state: what layers keep to look at is larger.
_FEW = 1 << 12
_OF_MODULES = frozenset(vars(nn.Module()))


class _State(NamedTuple):
    """What a module or an object keeps at one time.

    Args:
        values: What can be put back, by name, with tensors in memory of their own.
        names: Of all attributes.
    """

    values: dict[str, Any]
    names: frozenset[str]


#: The state of each module and object.
States: TypeAlias = list[_State]


class LayerAttributes:
    """Keeps numbers, strings, flags and small tensors in attributes of layers for recomputes.

    Args:
        layers: The layers of the stage.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = (module for layer in layers for module in layer.modules())
        # PyTorch's own layers keep no such state
        found = [vars(module) for module in modules if not _is_torchs(module)]
        places = (place for layer in layers for place in places_of(layer))
        found += [of for place in places if (of := place.attributes) is not None]
        self._kept = [*map(_Kept, {id(attributes): attributes for attributes in found}.values())]

    def met(self) -> States:
        """What layers keep now, in memory of its own."""
        copies: dict[int, Tensor] = {}
        return [_State(_own(kept.values(), copies), kept.names) for kept in self._kept]

    @contextmanager
    def restored(self, met: States) -> Iterator[None]:
        """Let layers have what a forward has met, inside this context.

        Args:
            met: What :meth:`met` gave before it; it stays as it is.
        """
        before = [dict(kept.attributes) for kept in self._kept]
        copies: dict[int, Tensor] = {}
        for kept, state in zip(self._kept, met, strict=True):
            kept.put(_own(state.values, copies), state.names)
        try:
            yield
        finally:
            for kept, attributes in zip(self._kept, before, strict=True):
                kept.attributes.update(attributes)
                if len(kept.attributes) > len(attributes):
                    for name in kept.attributes.keys() - attributes.keys():
                        del kept.attributes[name]


class _Kept:
    """The attributes of a module, or of an object that it holds.

    Args:
        attributes: By name.
    """

    __slots__ = ("_own", "attributes", "names")

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        self.names: frozenset[str] = frozenset()
        self._own: list[str] = []

    def values(self) -> dict[str, Any]:
        """What can be put back."""
        attributes = self.attributes
        if attributes.keys() != self.names:
            self.names = frozenset(attributes)
            self._own = sorted(self.names - _OF_MODULES)
        return {
            name: value
            for name in self._own
            if type(value := attributes[name]) in _PLAIN or _is_small(value)
        }

    def put(self, values: dict[str, Any], names: frozenset[str]) -> None:
        """Put values back as they were when there were attributes of those names."""
        if self.attributes.keys() != names:
            for name in self.values().keys() - names:  # of later forwards
                del self.attributes[name]
        self.attributes.update(values)


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is of PyTorch's own classes alone."""
    kinds = type(module).__mro__[:-1]
    return all(kind.__module__.partition(".")[0] == "torch" for kind in kinds)


def _is_small(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.numel() <= _FEW


def _own(values: dict[str, Any], copies: dict[int, Tensor]) -> dict[str, Any]:
    """Values in memory of their own.

    Args:
        values: By name.
        copies: Of tensors, by their ``id``: what several modules share is one tensor again.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                with torch.no_grad():
                    copies[id(value)] = value.clone()
            values = {**values, name: copies[id(value)]}
    return values
