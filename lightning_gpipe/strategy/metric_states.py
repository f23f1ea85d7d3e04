"""What a metric keeps: the stages that update it have it, and the others take it over.

Some metrics keep more than the states that they declare: a list that ``update`` fills, a counter.
What of that has changed goes with the states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torchmetrics import Metric

from lightning_gpipe.tensors.tree import version_of

_DATA = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(Tensor, np.ndarray, list, tuple, dict, set, frozenset, deque),
)


class _Nothing(Metric):
    """Has what every metric has."""

    def update(self) -> None: ...

    def compute(self) -> None: ...


_OF_ALL = frozenset(vars(_Nothing()))
_ABSENT = object()


class MetricStates:
    """What metrics keep."""

    def __init__(self) -> None:
        # by id: what else they keep, as it was at first, and the names of what was another once
        self._kept: dict[int, tuple[dict[str, Any], set[str]]] = {}

    def note(self, metric: Metric) -> None:
        """Note a metric that steps will update."""
        marks = {name: _mark(value) for name, value in _others(metric).items()}
        self._kept.setdefault(id(metric), (marks, set()))

    def of(self, metric: Metric) -> dict[str, Any]:
        """A metric's states, and what else its updates change, by the names of attributes."""
        marks, changing = self._kept[id(metric)]
        others = _others(metric)
        changing |= {name for name, v in others.items() if _mark(v) != marks.get(name, _ABSENT)}
        names = [*metric._defaults, *(name for name in others if name in changing)]
        return {name: getattr(metric, name) for name in names}

    def forget(self, left: Collection[int]) -> None:
        """Forget all metrics but those with these ids."""
        self._kept = {i: kept for i, kept in self._kept.items() if i in left}


class _Same:
    """Equals what holds the same object, which lives as long: so no other one gets its ``id``."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value


def _others(metric: Metric) -> dict[str, Any]:
    """Attributes that hold data and are no states."""
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in _OF_ALL and name not in metric._defaults and isinstance(value, _DATA)
    }


def _mark(value: Any) -> Any:
    """What tells that a value has changed."""
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return [(key, _mark(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_mark(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return set(value)
    return value if isinstance(value, _DATA) else _Same(value)
