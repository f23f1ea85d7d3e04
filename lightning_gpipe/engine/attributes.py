"""What layers keep in attributes, such as counters: a recompute must see that of its forward.

A warm-up that a layer counts itself, a temperature that it lowers, the state of a metric: these are
no buffers, and nothing tells that they change. So in a recompute those of the forward stand in
their places, and after it what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
#: Elements of a tensor up to which it may be such state: what layers keep to look at is larger.
_FEW = 1 << 12
_OF_MODULES = vars(nn.Module()).keys()


@dataclass(frozen=True, slots=True)
class _State:
    """What a module keeps at one time.

    Args:
        values: What can be put back, by name.
        names: Of all attributes.
    """

    values: dict[str, Any]
    names: frozenset[str]


#: The state of each module.
States: TypeAlias = list[_State]


class LayerAttributes:
    """Keeps numbers, strings, flags and small tensors in attributes of layers for recomputes.

    Args:
        modules: The modules of the stage, each once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # PyTorch's own layers keep no such state
        self._modules = [module for module in modules if not is_torchs(module)]

    def met(self) -> States:
        """What layers keep now, in memory of its own."""
        found = [vars(module) for module in self._modules]
        values = _copied([_values(attributes) for attributes in found])
        return [
            _State(own, frozenset(attributes))
            for own, attributes in zip(values, found, strict=True)
        ]

    @contextmanager
    def restored(self, met: States) -> Iterator[None]:
        """Let layers have what a forward has met, inside this context.

        Args:
            met: What :meth:`met` gave before it; it stays as it is.
        """
        places = [(vars(module), dict(vars(module))) for module in self._modules]
        copies = _copied([state.values for state in met])
        for (attributes, before), state, copy in zip(places, met, copies, strict=True):
            for name in _values(before).keys() - state.names:  # of later forwards
                del attributes[name]
            attributes.update(copy)
        try:
            yield
        finally:
            for attributes, before in places:
                for name in attributes.keys() - before.keys():
                    del attributes[name]
                attributes.update(before)


def is_torchs(module: nn.Module) -> bool:
    """Whether a module is of PyTorch's own classes alone."""
    kinds = type(module).__mro__[:-1]
    return all(kind.__module__.partition(".")[0] == "torch" for kind in kinds)


def _values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if (type(value) in _PLAIN or _is_small(value)) and name not in _OF_MODULES
    }


def _is_small(value: Any) -> bool:
    return type(value) is Tensor and not value.requires_grad and value.numel() <= _FEW


def _copied(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same in memory of its own; what several modules share is one tensor again."""
    known: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            with torch.no_grad():
                known[id(value)] = value.clone()
        return known[id(value)]

    return [{name: own(value) for name, value in state.items()} for state in states]
