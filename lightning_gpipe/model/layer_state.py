"""What layers can change beside weights and buffers, and where they find it."""

from __future__ import annotations

import argparse
import dis
import weakref
from collections import Counter, UserDict, UserList
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import filterfalse, islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_gpipe.model.own_state import (
    OTHERS,
    is_installed,
    own_state_kept_in_pass,
    package,
)
from lightning_gpipe.model.places import (
    CONTAINERS,
    NOTHING,
    OF_MODULES,
    Place,
    attributes_of,
    base_of,
    items_of,
    slots_of,
)
from lightning_gpipe.tensors.random_state import is_generator, kept

#: Objects of a layer, and entries of a container, up to which they are looked at.
_OBJECTS, _ENTRIES = 5000, 1000
_NONE: Mapping[str, Any] = MappingProxyType({})
_NAMESPACES = (SimpleNamespace, argparse.Namespace, UserDict, UserList)
_PLAIN = (int, float, complex, str, bytes, type(None), BuiltinFunctionType)
_is_kept = False


def places_of(layer: nn.Module, without: nn.Module | None = None) -> list[Place]:
    """The places that a layer, or another module, can change.

    These are what it holds in attributes, its modules, objects and classes too, and the globals and
    outer variables that functions of its classes name; not what belongs to PyTorch, to Lightning or
    to Python.

    Args:
        layer: The module.
        without: One in it that isn't looked at, nor those inside it.
    """
    return _Walk(layer, without).places


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


def own_places(module: nn.Module, without: nn.Module) -> list[Place]:
    """The places that a module can change, but for objects of installed packages.

    Args:
        module: The module.
        without: One in it that isn't looked at, nor those inside it.
    """
    places = places_of(module, without)
    foreign = tuple(
        f"{place.name}{more}" for place in places if _is_foreign(place) for more in ".["
    )
    return [p for p in places if not _is_foreign(p) and not p.name.startswith(foreign)]


def generators_held(layer: nn.Module) -> list[Any]:
    """The random generators in a layer's attributes, and in what these hold."""
    walk = _Walk(layer, None, functions=False)
    return [generator for _, generator in walk.generators]


def generators_of(
    module: nn.Module, without: nn.Module, beside: Mapping[str, Any] = _NONE
) -> dict[tuple[str, int], Any]:
    """The random generators that code of a module and of other objects can draw from.

    Those are what they hold, and globals and outer variables that their functions name.

    Args:
        module: The module.
        without: One in it that isn't looked at, nor those inside it.
        beside: The other objects, by their names.

    Returns:
        They by how the module calls them, and how many are called so before.
    """
    count = Counter[str]()
    found = dict[tuple[str, int], Any]()
    for name, generator in _Walk(module, without, beside).generators:
        found[name, count[name]] = generator
        count[name] += 1
    return found


def _is_foreign(place: Place) -> bool:
    kinds = (type, ModuleType, Tensor, np.ndarray, *CONTAINERS)
    is_object = place.key is None and not issubclass(type(place.value), (nn.Module, *kinds))
    return is_object and _is_installed(type(place.value))


def is_own(place: Place) -> bool:
    """Whether a place is the user's, no class, and not inside of something else."""
    kind = type(place.value)
    is_inside = "." in place.name or "[" in place.name
    return not (is_inside or issubclass(kind, (type, ModuleType)) or _is_installed(kind))


def is_held(place: Place) -> bool:
    """Whether a place is a module or one of the user's objects.

    Others, such as the dicts of a profiler, may change with a backward.
    """
    kind = type(place.value)
    others = (type, ModuleType, Tensor, np.ndarray, *CONTAINERS)
    if place.key is not None or issubclass(kind, others):
        return False
    return issubclass(kind, nn.Module) or not _is_installed(kind)


@contextmanager
def layer_state_kept(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers leave no trace in what they can change, inside the outermost such context.

    Args:
        layers: Those that are called; their modules are left to others.
    """
    global _is_kept
    if _is_kept:
        yield
        return
    walks = [_Walk(layer, None) for layer in layers]
    places = {(id(p.value), p.key): p for walk in walks for p in walk.places}
    own = {id(module) for layer in layers for module in layer.modules()}
    put_back = [place.keep() for place in places.values() if id(place.value) not in own]
    put_back += [kept(generator for _, generator in walk.generators) for walk in walks]
    _is_kept = True
    try:
        yield
    finally:
        _is_kept = False
        for back in put_back:
            back()


@contextmanager
def state_kept_in_pass(layers: Sequence[nn.Module]) -> Iterator[None]:
    """The same, and what else the user's code keeps, around calls without values of all layers.

    As in a real pass, a layer finds what those before it have kept.

    Args:
        layers: All layers of the backbone.
    """
    with own_state_kept_in_pass(layers), layer_state_kept(layers):
        yield


class _Walk:
    """Looks for what a layer can change.

    Args:
        layer: The layer.
        without: A module that isn't looked at.
        beside: Other objects, by their names.
        functions: Whether to look at what functions and classes name.
    """

    def __init__(
        self,
        layer: nn.Module,
        without: nn.Module | None,
        beside: Mapping[str, Any] = _NONE,
        functions: bool = True,
    ) -> None:
        self._functions = functions
        self.places: list[Place] = []
        self.generators: list[tuple[str, Any]] = []
        self._seen = set(map(id, without.modules())) if without is not None else set[int]()
        self._left: list[tuple[str, Any]] = [*beside.items()]
        self._look_at_module("", layer)
        limit = len(self._seen) + _OBJECTS
        while self._left and len(self._seen) < limit:
            self._look_at(*self._left.pop())

    def _add(self, name: str, value: Any, key: str | None = None) -> None:
        self.places.append(Place(name, value, key))

    def _look_at_module(self, name: str, module: nn.Module) -> None:
        """Look at a module and those inside it."""
        for inner, part in module.named_modules(prefix=name):
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            self._add(inner or type(part).__name__, part)
            kinds = [kind for kind in type(part).__mro__ if not _is_others(kind)]
            if kinds or not self._functions:  # else PyTorch's own
                attributes = [(k, v) for k, v in vars(part).items() if k not in OF_MODULES]
                self._left += [(f"{inner}.{k}" if inner else k, v) for k, v in attributes]
            for kind in filterfalse(_is_installed, kinds if self._functions else ()):
                self._look_at_class(kind.__name__, kind)

    def _look_at_class(self, name: str, kind: type) -> None:
        self._seen.add(id(kind))
        self._add(name, kind)
        self._left += [(f"{name}.{k}", v) for k, v in _own_names(vars(kind))]

    def _look_at(self, name: str, value: Any) -> None:
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        kind = type(value)  # a proxy claims to be of another class, or fails to tell
        if issubclass(kind, nn.Module):
            if not any(package(base.__module__) == "lightning" for base in kind.__mro__):
                self._look_at_module(name, value)
            return
        self._seen.add(id(value))
        if is_generator(value):
            self.generators.append((name, value))
            return
        for inner in _inside(kind, value):
            self._left.append((name, inner))
        if issubclass(kind, (FunctionType, type)) and not self._functions:
            return
        if issubclass(kind, FunctionType):
            self._look_into(value)
        elif issubclass(kind, (Tensor, np.ndarray)):
            if not getattr(value, "requires_grad", False):
                self._add(name, value)
        elif issubclass(kind, CONTAINERS):
            self._add(name, value)
            if issubclass(kind, dict):
                entries = islice(items_of(value).items(), _ENTRIES)
                self._left += [(f"{name}[{k!r}]", v) for k, v in entries]
            elif not issubclass(kind, set):  # which has no order
                items = islice(base_of(value).__iter__(value), _ENTRIES)
                self._left += [(f"{name}[{i}]", v) for i, v in enumerate(items)]
        elif issubclass(kind, tuple):
            self._left += [(f"{name}[{i}]", v) for i, v in enumerate(value[:_ENTRIES])]
        elif issubclass(kind, type):
            if not (_is_others(value) or _is_installed(value)):
                self._look_at_class(name, value)
        elif issubclass(kind, ModuleType):
            if not (package(value.__name__) in OTHERS or is_installed(package(value.__name__))):
                self._add(name, value)
        elif issubclass(kind, _NAMESPACES) or not _is_others(kind):
            attributes, slots = attributes_of(value), [*slots_of(kind)]
            if attributes is not None or slots:
                self._add(name, value)
                named = {k: getattr(value, k, None) for k in slots} | (attributes or {})
                self._left += [(f"{name}.{k}", v) for k, v in _own_names(named)]

    def _look_into(self, function: FunctionType) -> None:
        """Look at the globals and the outer variables that a function names."""
        if package(function.__module__) in OTHERS or _is_installed(function):
            return
        names, stored = _globals_of(function.__code__)
        inside = function.__globals__
        for name in dict.fromkeys([*names, *stored]):
            value = inside.get(name, NOTHING)
            if value is NOTHING and name not in stored:
                continue  # an attribute
            if name in stored:
                self._add(name, inside, name)
            self._left.append((name, value))
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if id(cell) not in self._seen and name != "__class__":  # which super() uses
                self._seen.add(id(cell))
                place = Place(name, cell, name)
                self.places.append(place)
                self._left.append((name, place.entries()[name]))


def _inside(kind: type, value: Any) -> list[Any]:
    """What something that is called, or refers to something, leads to."""
    if issubclass(kind, (staticmethod, classmethod)):
        return [value.__func__]
    if issubclass(kind, property):
        return [value.fget, value.fset]
    if issubclass(kind, MethodType):
        return [value.__func__, value.__self__]
    if issubclass(kind, partial):
        return [value.func, value.args, value.keywords]
    if issubclass(kind, weakref.ref):
        return [value()]
    return [value.__wrapped__] if kind.__name__ == "_lru_cache_wrapper" else []


def _own_names(names: Any) -> Iterator[tuple[str, Any]]:
    """What isn't Python's own; ``__init__`` and the like aren't run in a forward."""
    wanted = ("__call__", "__getitem__")
    return ((k, v) for k, v in [*names.items()] if not k.startswith("__") or k in wanted)


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
