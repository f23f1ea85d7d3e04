"""Places that the code of layers can change: objects, containers, globals, classes, arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import CellType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)
#: Elements of a tensor or array, and entries of a container, up to which they are compared.
FEW = 1 << 12
#: Attributes that modules have by themselves; of recurrent ones weak references to weights, too,
#: which must be free to go when these are moved.
OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
NOTHING = object()
_PLAIN = frozenset({int, float, complex, bool, str, bytes})
#: What stands in a place, by name, key or number.
Entries: TypeAlias = dict[Any, Any]
#: A value with what tells that it was changed in place.
Entry: TypeAlias = tuple[Any, Any]
#: What stands in a place, to compare.
Contents: TypeAlias = dict[Any, Entry]


@dataclass(frozen=True, slots=True)
class Place:
    """Something that the code of layers can change.

    Args:
        name: How the first of them calls it.
        value: An object, a container, a tensor, a module; or the globals or the cell of functions.
        key: The one name in those that it is about; None: everything.
        layers: Those that have it, by their index.
    """

    name: str
    value: Any
    key: str | None = None
    layers: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The class of what stands there."""
        value = self.value if self.key is None else self.entries()[self.key]
        return "nothing" if value is NOTHING else type(value).__name__

    @property
    def is_large(self) -> bool:
        """Whether it is a container of too many entries to look at each."""
        is_container = self.key is None and isinstance(self.value, CONTAINERS)
        return is_container and base_of(self.value).__len__(self.value) > FEW

    def entries(self) -> Entries:
        """What stands there now."""
        value = self.value
        if self.key is not None:
            return {self.key: _bound(value, self.key)}
        if isinstance(value, (Tensor, np.ndarray)):
            return {"": value}
        if isinstance(value, dict):
            return items_of(value)
        if isinstance(value, set):
            return dict.fromkeys(set.__iter__(value))
        if isinstance(value, CONTAINERS):
            return dict(enumerate(base_of(value).__iter__(value)))
        if isinstance(value, (type, ModuleType)):
            return {k: v for k, v in [*vars(value).items()] if not k.startswith("__")}
        if isinstance(value, nn.Module):
            return {k: v for k, v in [*vars(value).items()] if k not in OF_MODULES}
        return {**_slots_of(value), **(attributes_of(value) or {})}

    def source(self) -> Callable[[], Mapping[Any, Any]] | None:
        """What gives the dict in which the entries stand; None: they don't stand in one."""
        value = self.value
        if type(value) is dict:  # or globals; a default dict makes what is asked for
            return partial(_same, value)
        if self.key is not None or isinstance(value, (Tensor, np.ndarray, *CONTAINERS)):
            return None
        if isinstance(value, (type, ModuleType, nn.Module)):
            return partial(vars, value)
        if attributes_of(value) is None or any(True for _ in slots_of(type(value))):
            return None
        return partial(object.__getattribute__, value, "__dict__")

    def contents(self, buffers: bool = True) -> Contents:
        """What stands there, to compare.

        Args:
            buffers: Whether a module's are among it.
        """
        found = {"": len(self.value)} if self.is_large else self.entries()
        if buffers and has_buffers(self):
            found |= {("buffer", name): buffer for name, buffer in self.value._buffers.items()}
        return {name: (value, _mark(value)) for name, value in found.items()}

    def put_back(self, before: Entries) -> None:
        """Let the same stand there as before, in the same object."""
        now, value = self.entries(), self.value
        if now.keys() == before.keys() and all(now[name] is before[name] for name in now):
            return
        if isinstance(value, CONTAINERS) and self.key is None:
            refill(value, before if isinstance(value, (dict, set)) else before.values())
            return
        for name in dict.fromkeys([*before, *now]):
            old, new = before.get(name, NOTHING), now.get(name, NOTHING)
            if new is not old and not issubclass(type(new), ModuleType):  # imported meanwhile
                self._set(name, old)

    def keep(self) -> Callable[[], None]:
        """Returns what puts all back, the values of small tensors and arrays, too."""
        value, before = self.value, self.entries()
        if self.key is not None or not isinstance(value, (Tensor, np.ndarray)):
            return lambda: self.put_back(before)
        if not has_values(value):
            return lambda: None
        mark, copied = _mark(value), own_copy(value)

        def back() -> None:
            if _mark(value) != mark:
                with torch.no_grad():
                    value[...] = copied

        return back

    def _set(self, name: Any, old: Any) -> None:
        value = self.value
        if isinstance(value, CellType):
            if old is not NOTHING:
                value.cell_contents = old
            else:
                del value.cell_contents
        elif isinstance(value, (type, ModuleType)):
            setattr(value, name, old) if old is not NOTHING else delattr(value, name)
        else:
            names = value if isinstance(value, dict) else attributes_of(value)
            if names is None or name in _slots_of(value, True):
                if old is not NOTHING:
                    object.__setattr__(value, name, old)
                else:
                    object.__delattr__(value, name)
            elif old is not NOTHING:
                names[name] = old
            else:
                names.pop(name, None)


def _same(value: Any) -> Any:
    return value


def has_changed(before: Contents, now: Contents) -> bool:
    """Whether what stands in a place is something else than before."""
    if before.keys() != now.keys():
        return True
    return any(is_other(entry, now[name]) for name, entry in before.items())


def is_other(before: Entry, now: Entry) -> bool:
    """Whether a value is another one than before, or was changed in place."""
    return before[1] != now[1] or not _is_same(before[0], now[0])


def has_values(value: Any) -> bool:
    """Whether a tensor or an array is small, has values and isn't trained."""
    if issubclass(type(value), np.ndarray):
        return value.size <= FEW and not value.dtype.hasobject
    is_plain = type(value) is Tensor and not value.requires_grad and not value.is_meta
    return is_plain and not value.is_inference() and value.numel() <= FEW


def own_copy(value: Any) -> Any:
    """A tensor or an array in memory of its own."""
    if isinstance(value, np.ndarray):
        return value.copy()
    with torch.no_grad():
        return value.clone()


def has_buffers(place: Place) -> bool:
    """Whether it is a module with buffers of its own."""
    return isinstance(place.value, nn.Module) and len(place.value._buffers) > 0


def is_frozen(kind: type) -> bool:
    """Whether it is a dataclass whose fields can't be set."""
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def base_of(container: Any) -> Any:
    """The class of a container that is Python's own."""
    kinds = type(container).__mro__
    return next(kind for kind in kinds if kind.__module__ in ("builtins", "collections"))


def items_of(container: dict[Any, Any]) -> Entries:
    """What a dictionary holds, whatever its class makes of that when it is read."""
    return dict(base_of(container).items(container))


def refill(container: Any, entries: Iterable[Any]) -> None:
    """Let a container hold some entries and nothing else, whatever its class makes of that."""
    base = base_of(container)
    base.clear(container)
    if isinstance(container, dict) and isinstance(entries, dict):
        for name, value in entries.items():
            base.__setitem__(container, name, value)
        return
    (base.update if isinstance(container, set) else base.extend)(container, entries)


def ids_in(container: Any) -> list[int]:
    """What tells the entries of a container from others."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object keeps, though its class may answer for something else."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def slots_of(kind: type) -> Iterable[str]:
    """The names of a class's slots."""
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__"):
                yield name


def _slots_of(value: Any, even_empty: bool = False) -> Entries:
    found: Entries = {}
    for name in slots_of(type(value)):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            if even_empty:
                found[name] = NOTHING
    return found


def _bound(source: Any, name: str) -> Any:
    if not isinstance(source, CellType):
        return source.get(name, NOTHING)
    try:
        return source.cell_contents
    except ValueError:  # empty
        return NOTHING


def _mark(value: Any) -> Any:
    kind = type(value)  # a proxy claims to be of another class, or fails to tell
    if issubclass(kind, np.ndarray):
        return value.tobytes() if has_values(value) else None
    if not issubclass(kind, Tensor) or value.is_inference():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return value._version


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    kind = type(value)
    return kind in _PLAIN and kind is type(other) and bool(value == other)
