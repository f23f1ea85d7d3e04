"""How a place that layers can change was, to tell fast whether it is the same still.

A stage may have hundreds of places, and each is looked at several times for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gpipe.model.places import Entries, Place, has_buffers, is_frozen

_WITH_VALUES = (Tensor, np.ndarray)
#: Of values of other kinds the kind tells whether they are kept.
_UNCLEAR = (tuple, frozenset, *_WITH_VALUES)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the entries of a place were, if they stand in a dict.

    It holds no value that isn't kept anyway, of which a layer may let go.

    Args:
        source: Gives the dict.
        size: Of all that stands in it; None: it has other names, too, which come and go.
        names: Those that are looked at, first those of values that are kept.
        kept: These values.
        kinds: The classes of the other ones.
        get: Gets the values of all names.
    """

    source: Callable[[], Mapping[Any, Any]]
    size: int | None
    names: tuple[Any, ...]
    kept: tuple[Any, ...]
    kinds: tuple[type, ...]
    get: Callable[[Mapping[Any, Any]], tuple[Any, ...]]

    @classmethod
    def of(cls, place: Place, entries: Entries, kept: Entries) -> Snapshot | None:
        """How a place is now; None: that wouldn't tell if it is the same later.

        Args:
            place: The place.
            entries: What stands there.
            kept: Those of them that are kept, and never change by themselves.
        """
        others = {name: type(value) for name, value in entries.items() if name not in kept}
        if any(map(_is_unclear, others.values())):
            return None
        return cls._of(place, kept, others)

    @classmethod
    def without_values(cls, place: Place) -> Snapshot | None:
        """How a place is now, of which nothing is kept; None: there are tensors or arrays."""
        if place.is_large or has_buffers(place):
            return None
        kinds = {name: type(value) for name, value in place.entries().items()}
        if any(issubclass(kind, _WITH_VALUES) for kind in kinds.values()):
            return None
        return cls._of(place, {}, kinds)

    @classmethod
    def _of(cls, place: Place, kept: Entries, others: dict[Any, type]) -> Snapshot | None:
        if (source := place.source()) is None:
            return None
        size = len(source()) if place.key is None else None
        names = *kept, *others
        return cls(
            source, size, names, tuple(kept.values()), tuple(others.values()), _getter(names)
        )

    def values(self) -> tuple[Any, ...] | None:
        """What stands there now, by name; None: it has other names than before."""
        source = self.source()
        if self.size is not None and len(source) != self.size:
            return None
        try:
            return self.get(source)
        except KeyError:
            return None

    def is_same(self, values: tuple[Any, ...] | None) -> bool:
        """Whether that is what stood there, as far as it is kept."""
        if values is None or not all(map(is_, values, self.kept)):
            return False
        return not self.kinds or tuple(map(type, values[len(self.kept) :])) == self.kinds

    def is_still(self, before: tuple[Any, ...] | None) -> bool:
        """Whether the very same stands there as when :meth:`values` gave some."""
        now = self.values()
        return now is not None and before is not None and all(map(is_, now, before))


def _is_unclear(kind: type) -> bool:
    return issubclass(kind, _UNCLEAR) or is_frozen(kind)


def _getter(names: tuple[Any, ...]) -> Callable[[Mapping[Any, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda source: tuple([source[name] for name in names])
