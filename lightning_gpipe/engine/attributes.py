"""What layers keep in attributes, such as counters: a recompute must see that of its forward.

A warm-up that a layer counts itself, a temperature that it lowers, the state of a metric: these are
no buffers, and nothing tells that they change. So in a recompute those of the forward stand in
their places, and after it what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
#: Elements of a tensor up to which it may be such state: what layers keep to look at is larger.
_FEW = 1 << 12
_OF_MODULES = vars(nn.Module()).keys()

#: The state of each module by name.
States: TypeAlias = list[dict[str, Any]]


class LayerAttributes:
    """Keeps numbers, strings, flags and small tensors in attributes of layers for recomputes.

    Args:
        modules: The modules of the stage, each once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # PyTorch's own layers keep no such state
        self._modules = [m for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._copies: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}

    def met(self) -> States:
        """What layers keep now, in memory of its own."""
        return [
            {name: self._copied((i, name), value) for name, value in _state(vars(module)).items()}
            for i, module in enumerate(self._modules)
        ]

    @contextmanager
    def restored(self, met: States) -> Iterator[None]:
        """Let layers have what a forward has met, inside this context.

        Args:
            met: What :meth:`met` gave before it.
        """
        places = [(vars(module), dict(vars(module))) for module in self._modules]
        for (attributes, before), state in zip(places, met, strict=True):
            _replace(attributes, _state(before).keys() | state.keys(), state)
        try:
            yield
        finally:
            for (attributes, before), state in zip(places, met, strict=True):
                seen = _state(before).keys() | _state(attributes).keys() | state.keys()
                _replace(attributes, seen, before)

    def _copied(self, place: tuple[int, str], value: Any) -> Any:
        """A value that nobody changes; a tensor that hasn't changed is copied once."""
        if not isinstance(value, Tensor):
            return value
        version = 0 if value.is_inference() else value._version
        source, copied_version, copy = self._copies.get(place, (None, 0, value))
        if source is not value or copied_version != version:
            with torch.no_grad():
                copy = value.clone()
            self._copies[place] = value, version, copy
        return copy


def _state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if (type(value) in _PLAIN or _is_small(value)) and name not in _OF_MODULES
    }


def _is_small(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.numel() <= _FEW


def _replace(attributes: dict[str, Any], names: Iterable[str], values: Mapping[str, Any]) -> None:
    """Let attributes of some names have other values, or none."""
    for name in names:
        if name in values:
            attributes[name] = values[name]
        else:
            attributes.pop(name, None)
