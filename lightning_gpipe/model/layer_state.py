"""What layers can change beside weights and buffers: objects, containers, globals."""

from __future__ import annotations

import argparse
import dis
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import filterfalse, islice
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_gpipe.model.own_state import OTHERS, is_installed, package

#: Objects of a layer, and entries of a container, up to which they are looked at.
_OBJECTS, _ENTRIES = 1000, 100
_OF_MODULES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, deque)
_NO_STATE = (type, ModuleType, BuiltinFunctionType, nn.Module)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_PLAIN = frozenset({int, float, complex, bool, str, bytes})
_NOTHING = object()
#: What stands in a place, by name or number, and for tensors how often each was changed.
Contents: TypeAlias = dict[Any, tuple[Any, int]]


@dataclass(frozen=True, slots=True)
class Place:
    """Something that the code of layers can change.

    Args:
        name: How the first of them calls it.
        kind: Of which class it is.
        value: An object, a container, a tensor, a module; or the globals or the cell of functions.
        key: The one name in those that it is about; None: everything.
        layers: Those that have it, by their index.
    """

    name: str
    kind: str
    value: Any
    key: str | None = None
    layers: list[int] = field(default_factory=list)

    @property
    def is_own(self) -> bool:
        """Whether it is the user's, no class, and not inside of something else."""
        kind = type(self.value)
        is_inside = "." in self.name or "[" in self.name
        return not (is_inside or issubclass(kind, type) or _is_installed(kind))

    @property
    def attributes(self) -> dict[str, Any] | None:
        """What one of the user's own objects keeps, or a small dict; None: it is something else."""
        value, kind = self.value, type(self.value)
        if self.key is not None:
            return None
        if kind is dict:
            is_small = len(value) <= _ENTRIES and all(type(key) is str for key in value)
            return value if is_small else None
        if issubclass(kind, (type, nn.Module, Tensor, *_CONTAINERS)) or _is_installed(kind):
            return None
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
        return found

    def contents(self) -> Contents:
        """What stands there now."""
        value = self.value
        if self.key is not None:
            try:
                now = value.get(self.key, _NOTHING) if type(value) is dict else value.cell_contents
            except ValueError:  # an empty cell
                now = _NOTHING
            return {self.key: _marked(now)}
        if isinstance(value, Tensor):
            return {"": _marked(value)}
        if isinstance(value, nn.Module):
            buffers = {("buffer", k): _marked(v) for k, v in value._buffers.items()}
            own = {k: _marked(v) for k, v in vars(value).items() if k not in _OF_MODULES}
            return {**own, **buffers}
        if isinstance(value, type):
            return {k: _marked(v) for k, v in _own_names(vars(value))}
        if isinstance(value, _CONTAINERS):
            return {id(k): _marked(v) for k, v in _items(value)} | {"": (len(value), 0)}
        return {k: _marked(v) for k, v in (_attributes_of(value) or {}).items()}


def has_changed(before: Contents, now: Contents) -> bool:
    """Whether what stands in a place is something else than before."""
    if before.keys() != now.keys():
        return True
    return any(
        version != now[key][1] or not _is_same(value, now[key][0])
        for key, (value, version) in before.items()
    )


def places_of(layer: nn.Module) -> list[Place]:
    """The places that a layer can change.

    These are what it holds in attributes, its modules, objects and classes too, and the globals and
    outer variables that functions of its classes name; not what belongs to PyTorch, to Lightning or
    to Python.
    """
    return _Walk(layer).places


def shared_places(layers: Sequence[nn.Module], parts: Sequence[int]) -> dict[str, Place]:
    """The places that layers of several virtual stages can change, by names of their own.

    Args:
        layers: The layers of the backbone.
        parts: For each its virtual stage.
    """
    found: dict[tuple[int, str | None], Place] = {}
    for index, layer in enumerate(layers):
        for place in places_of(layer):
            first = found.setdefault((id(place.value), place.key), place)
            first.layers.append(index)
    shared = [p for p in found.values() if len({parts[index] for index in p.layers}) > 1]
    return {f"{p.layers[0]} {p.name} {p.key} {isinstance(p.value, type)}": p for p in shared}


class _Walk:
    """Looks for what a layer can change.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.places: list[Place] = []
        self._seen: set[int] = set()
        self._left: list[tuple[str, Any]] = []
        for name, part in layer.named_modules():
            kinds = [kind for kind in type(part).__mro__ if not _is_others(kind)]
            if kinds:
                self._add(name or type(part).__name__, part)
                self._left += [(f"{name}.{k}" if name else k, v) for k, v in _attributes(part)]
            for kind in filterfalse(_is_installed, kinds):
                self._add(kind.__name__, kind)
                self._left += [(f"{kind.__name__}.{k}", v) for k, v in _own_names(vars(kind))]
        while self._left and len(self._seen) < _OBJECTS:
            self._look_at(*self._left.pop())

    def _add(self, name: str, value: Any, key: str | None = None, kind: Any = None) -> None:
        kind = type(value) if kind is None else kind
        self.places.append(Place(name, kind.__name__, value, key))

    def _look_at(self, name: str, value: Any) -> None:
        value = getattr(value, "__func__", value) if _is_method(value) else value
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        kind = type(value)  # a proxy claims to be of another class, or fails to tell
        if issubclass(kind, FunctionType):
            self._look_into(value)
        elif issubclass(kind, Tensor):
            if not value.requires_grad:
                self._add(name, value)
        elif issubclass(kind, _CONTAINERS):
            self._add(name, value)
            if not issubclass(kind, set):  # which has no order
                self._left += [(f"{name}[{k!r}]", v) for k, v in _items(value)]
        elif issubclass(kind, tuple):
            self._left += [(f"{name}[{i}]", v) for i, v in enumerate(value[:_ENTRIES])]
        elif not issubclass(kind, _NO_STATE):
            attributes = _attributes_of(value)
            if attributes is not None and (kind in _NAMESPACES or not _is_others(kind)):
                self._add(name, value)
                self._left += [(f"{name}.{k}", v) for k, v in _own_names(attributes)]

    def _look_into(self, function: FunctionType) -> None:
        """Look at the globals and the outer variables that a function names."""
        if package(function.__module__) in OTHERS or _is_installed(function):
            return
        names, stored = _globals_of(function.__code__)
        inside = function.__globals__
        for name in dict.fromkeys([*names, *stored]):
            value = inside.get(name, _NOTHING)
            if value is _NOTHING and name not in stored:
                continue  # an attribute
            if name in stored:
                self._add(name, inside, name, type(value))
            self._left.append((name, value))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if id(cell) not in self._seen and name != "__class__":  # which super() uses
                self._seen.add(id(cell))
                try:
                    value = cell.cell_contents
                except ValueError:  # not set yet
                    value = None
                self._add(name, cell, name, type(value))
                self._left.append((name, value))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in vars(module).items() if k not in _OF_MODULES)


def _own_names(names: Any) -> Iterator[tuple[str, Any]]:
    """What isn't Python's own; ``__init__`` and the like aren't run in a forward."""
    wanted = ("__call__", "__getitem__")
    return ((k, v) for k, v in [*names.items()] if not k.startswith("__") or k in wanted)


def _is_method(value: Any) -> bool:
    return type(value) in (staticmethod, classmethod)


def _items(container: Any) -> list[tuple[Any, Any]]:
    """The first entries, as the container's base class gives them."""
    if isinstance(container, dict):
        return [*islice(dict.copy(container).items(), _ENTRIES)]
    base: Any = next(base for base in _CONTAINERS if isinstance(container, base))
    return [*enumerate(islice(base.__iter__(container), _ENTRIES))]


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object keeps, though its class may answer for something else."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found.copy() if type(found) is dict else None


def _is_others(kind: type) -> bool:
    return package(kind.__module__) in OTHERS


def _is_installed(source: Any) -> bool:
    return _installed(package(source.__module__))


_installed = lru_cache(maxsize=None)(is_installed)


@lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that a function's code may name, and those that it sets."""
    named, stored = code.co_names, tuple[str, ...]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored += (str(instruction.argval),)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function inside
            inside = _globals_of(constant)
            named, stored = named + inside[0], stored + inside[1]
    return named, stored


def _marked(value: Any) -> tuple[Any, int]:
    if not issubclass(type(value), Tensor) or value.is_inference():
        return value, 0
    with torch._C.DisableTorchFunctionSubclass():
        return value, value._version


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    kind = type(value)
    return kind in _PLAIN and kind is type(other) and bool(value == other)
