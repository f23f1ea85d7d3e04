"""What user code keeps beside a module's tensors, put back after calls without values.

Such a call leaves tensors without values wherever the code keeps some: in attributes, in lists and
dicts, in globals, in caches of functions. Real calls would compute with them.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from operator import is_
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_gpipe.model.places import OF_MODULES, ids_in, refill

#: Entries of a list or a dict in which objects are looked for.
_FEW = 1000
#: Packages whose objects are nobody's own.
OTHERS = {"torch", "lightning", "torchmetrics", "lightning_gpipe", *sys.stdlib_module_names}
_INSTALLED = {"site-packages", "dist-packages"}
_NO_DATA = (type, ModuleType, FunctionType)
_ATOMS = {bool, int, float, complex, str, bytes, type(None), FunctionType}
_CONTAINERS = (list, dict, set)
_outermost: _OwnState | None = None
_is_in_pass = False


@contextmanager
def own_state_kept(module: nn.Module, everything: bool = False) -> Iterator[None]:
    """Let no tensors without values stay in what code of the user's keeps.

    That is looked for in functions' caches, and in globals, classes and objects of the packages
    that the module's classes come from, if these aren't installed ones; what holds such a tensor
    then holds what it did before. Inside such a context that is done for what it has found.

    Args:
        module: The user's module, or a part of it.
        everything: Whether all is put back that has changed in those packages' globals, classes
            and objects, and not only tensors without values.
    """
    global _outermost
    outer = _outermost
    if _is_in_pass:
        yield
        return
    if outer is not None:
        try:
            yield
        finally:
            outer.put_back()
        return
    _outermost = state = _OwnState(module)
    try:
        yield
    finally:
        _outermost = None
        state.put_back(everything)
        state.clear_caches(_caches())


@contextmanager
def own_state_kept_in_pass(layers: Sequence[nn.Module]) -> Iterator[None]:
    """The same around calls of all layers in turn: once for all of them, since it takes a while.

    As in a real pass, a layer finds what those before it have kept.

    Args:
        layers: All layers of the backbone.
    """
    global _is_in_pass
    with own_state_kept(nn.ModuleList(layers)):
        before, _is_in_pass = _is_in_pass, True
        try:
            yield
        finally:
            _is_in_pass = before


class _OwnState:
    def __init__(self, module: nn.Module) -> None:
        kinds = {kind for part in module.modules() for kind in type(part).__mro__}
        packages = {package(kind.__module__) for kind in kinds} - OTHERS
        self._own = {package for package in packages if not is_installed(package)}
        self._own_kinds: dict[type, bool] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._own_caches: list[Any] = []  # of which the collector may not know
        holders = self._holders(module)
        self._attributes = [(holder, dict(vars(holder))) for holder in holders]
        caches = [*_caches(), *self._own_caches]
        self._caches = {id(cache): (cache, cache.cache_info().misses) for cache in caches}

    def put_back(self, everything: bool = False) -> None:
        for holder, values in self._attributes:
            now = dict(vars(holder))
            for name in _differing(now, values):
                with suppress(AttributeError, TypeError):  # it can't be set: nor could the user
                    if name in values and _is_wrong(now.get(name), everything):
                        setattr(holder, name, values[name])
                    elif name not in values and _is_wrong(now[name], everything):
                        delattr(holder, name)
        for container, before in self._contents:
            if ids_in(container) != ids_in(before) and _is_wrong(container, everything):
                refill(container, before)
        self.clear_caches(cache for cache, _ in self._caches.values())

    def clear_caches(self, caches: Iterable[Any]) -> None:
        for cache in caches:
            _, before = self._caches.get(id(cache), (None, 0))
            if cache.cache_info().misses != before and _keeps_no_values(cache):
                cache.cache_clear()

    def _holders(self, module: nn.Module) -> list[Any]:
        """All that has attributes; notes the containers on the way."""
        of_modules = (vars(part).items() for part in module.modules() if self._is_own(part))
        left = [v for items in of_modules for k, v in items if k not in OF_MODULES]
        found: list[Any] = []
        for name in _modules_of(frozenset(self._own), len(sys.modules)):
            source = sys.modules.get(name)
            if isinstance(source, ModuleType):
                found.append(source)
                left += _named(source)
        seen: set[int] = set()
        while left:
            value = left.pop()
            kind = type(value)  # a proxy claims to be of another class, or fails to tell
            if kind in _ATOMS or id(value) in seen:
                continue
            if issubclass(kind, (nn.Module, Tensor, ModuleType)):
                continue
            seen.add(id(value))
            if kind is functools._lru_cache_wrapper:
                self._own_caches.append(value)
            if kind in _CONTAINERS:
                entries = dict(value) if kind is dict else list(value)
                self._contents.append((value, entries))
            if issubclass(kind, dict):
                left += [*islice(value.values(), _FEW)]
            elif issubclass(kind, (list, tuple, set)):
                left += [*islice(value, _FEW)]
            elif self._is_own(value) and hasattr(value, "__dict__"):
                found.append(value)
                left += _named(value)
        return found

    def _is_own(self, value: Any) -> bool:
        kind = value if issubclass(type(value), type) else type(value)
        if kind not in self._own_kinds:
            # a parametrized module's class is torch's, and its base the user's
            packages = {package(base.__module__) for base in kind.__mro__}
            self._own_kinds[kind] = not packages.isdisjoint(self._own)
        return self._own_kinds[kind]


def _is_wrong(value: Any, everything: bool) -> bool:
    if issubclass(type(value), ModuleType):  # imported meanwhile
        return False
    return everything or _has_no_values(value)


def _named(holder: Any) -> list[Any]:
    """What a user has given names in an object, a class or a module."""
    return [value for name, value in vars(holder).items() if name[:2] != "__"]


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The names, of those that a user gives, of which another value, or none, is there now."""
    if [*now] == [*before] and all(map(is_, now.values(), before.values())):
        return []  # nearly always: thousands of names, compared in no time
    names = now.keys() | before.keys()
    return [k for k in names if k[:2] != "__" and now.get(k) is not before.get(k)]


def _caches() -> list[Any]:
    """The caches of all functions that live."""
    return [cache for known in _known_caches(len(sys.modules)) if (cache := known()) is not None]


@functools.lru_cache(maxsize=4)
def _modules_of(packages: frozenset[str], modules: int) -> list[str]:
    """Looks for the modules of packages once for each number of imported modules."""
    return [name for name in list(sys.modules) if package(name) in packages]


@functools.lru_cache(maxsize=1)
def _known_caches(modules: int) -> list[Any]:
    """Looks for caches once for each number of imported modules: it takes a while."""
    found = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [weakref.ref(each) for each in found]


def _has_no_values(value: Any) -> bool:
    """Whether a tensor has no values, or one of those that a list or the like holds."""
    if issubclass(type(value), dict):
        value = list(value.values())
    each = value if issubclass(type(value), (list, tuple, set)) else [value]
    tensors = [x for x in each if issubclass(type(x), Tensor)]
    return any(isinstance(x, FakeTensor) or x.is_meta for x in tensors)


def _keeps_no_values(cache: Any) -> bool:
    """Whether a function's cache has kept a tensor without values."""
    left, seen = [cache], set[int]()
    while left and len(seen) < _FEW:
        for value in gc.get_referents(left.pop()):
            if issubclass(type(value), Tensor):
                if _has_no_values(value):
                    return True
            elif id(value) not in seen and not issubclass(type(value), _NO_DATA):
                seen.add(id(value))
                left.append(value)
    return False


def package(name: Any) -> str:
    """The package of a module's dotted name."""
    return str(name).partition(".")[0]


def is_installed(package: str) -> bool:
    """Whether a package is an installed one, and not the user's own code."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not _INSTALLED.isdisjoint(Path(file).parts)
