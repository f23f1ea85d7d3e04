"""Modules that stand on the meta device until it is known who holds which layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from lightning_gpipe.model.elsewhere import is_elsewhere
from lightning_gpipe.model.on_meta import Attributes
from lightning_gpipe.model.parameters import own_tensors
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.places import OF_MODULES, attributes_of
from lightning_gpipe.model.recording import Recording, View, written_by
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.random_state import preserved

_HOST = torch.device("cpu")
#: How far objects in objects are looked into, and at how many values.
_DEPTH, _MANY = 3, 1 << 16


class Unbuilt(ValueError):
    """A layer on the meta device can't be given values."""


class LazyModule:
    """How the tensors of a module that stand on the meta device come by their values.

    Of a module that was built inside :meth:`recording` these are the ones that an ordinary run of
    the same code gives. Others are initialized by ``reset_parameters()``, or ``init_weights()``, of
    the modules that hold them, and by ``init_weights(module)`` of the LightningModule, if it has
    one: with a generator that is seeded for each layer.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        hook = getattr(module, "init_weights", None)
        self._hook: Callable[[nn.Module], Any] | None = hook if _takes_module(hook) else None
        self.forget()
        self._module_name = type(module).__name__
        self._initializes_all = hook is not None and not _takes_module(hook)
        self.kept: Partition | None = None  # of a run that has left each rank its part

    @classmethod
    def of(cls, module: nn.Module) -> LazyModule:
        """What is known of a module; the same object until the module is gone."""
        if module not in _known:
            _known[module] = cls(module)
        return _known[module]

    @contextmanager
    def recording(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Build parts of a module on the meta device inside.

        Args:
            module: The user's module.
            device: Where tensors go that are neither parameters nor buffers.

        Raises:
            Unbuilt: If some values don't follow of what has run.
        """
        with self._built.building():
            yield
        for part, name, tensor in tensors_on_meta(module.modules()):
            view = self._built.view(tensor)
            if view is not None:
                self._views.setdefault(part, {})[name] = view
            elif self._hook is None:
                raise Unbuilt(f"the values of '{name}' of {type(part).__name__} can't be recorded")
        own = _ids_of(module)
        for part, name in attributes_on_meta(module):
            what = f"'{name}' of {type(part).__name__}"
            real = partial(self._real, own, what, device)
            part.__dict__[name] = tree_map(real, part.__dict__[name])
        for part in module.modules():
            for name, value in part.__dict__.items():
                if not name.startswith("_") and _hides_meta(value, own):
                    raise Unbuilt(f"tensors of '{name}' of {type(part).__name__} can't be recorded")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let what is copied to tensors on the meta device inside be their values."""
        with self._loaded:
            yield

    def provide(
        self, own: Mapping[str, Any], values: Mapping[str, Any], read: Callable[[str], Tensor]
    ) -> None:
        """Tell what :meth:`loading` will copy from, where that isn't read yet.

        Args:
            own: The module's state dict.
            values: What will be loaded; tensors on the meta device stand for what can be read.
            read: Reads an entry by its key.
        """
        for key, value in values.items():
            if isinstance(value, Tensor) and value.is_meta and not is_elsewhere(own[key]):
                self._loaded.provide(value, partial(read, key))

    def forget(self) -> None:
        """Let go of what was recorded: each rank has built what it holds."""
        self._built = Recording(draws=self._hook is None)
        self._loaded = Recording(copies=False)
        #: Those of what was built, whose type may change before they are asked for.
        self._views: WeakKeyDictionary[nn.Module, dict[str, View]] = WeakKeyDictionary()

    def check(self, layer: Iterable[nn.Module], prefix: str) -> None:
        """Check that a layer can be given values.

        Args:
            layer: Its modules.
            prefix: Its dotted name, for the error.

        Raises:
            Unbuilt: If it can't, with what to do.
        """
        parts = list(layer)
        initialized = {m for part in parts if _initializer(part) for m in part.modules()}
        for part, name, tensor in tensors_on_meta(parts):
            if self._view(part, name, tensor) or self._loaded.view(tensor):
                continue
            if self._initializes_all:
                raise Unbuilt(
                    f"init_weights() of {self._module_name} initializes the whole module, of which"
                    " each process holds a part: let it take a module as its argument,"
                    " init_weights(self, module); it is called with each that a process holds."
                )
            if self._hook is None and part not in initialized:
                raise Unbuilt(_unbuilt(part, name, prefix))

    def values(self, layer: Iterable[nn.Module], seed: int, prefix: str) -> dict[int, Tensor]:
        """The values of the tensors of a layer that stand on the meta device, in host memory.

        Args:
            layer: Its modules, children before parents.
            seed: Of the random numbers that it is initialized with.
            prefix: Its dotted name, for errors.

        Returns:
            By the ``id`` of each tensor.

        Raises:
            Unbuilt: If some of them get no value.
        """
        parts, places = list(layer), [*tensors_on_meta(layer)]
        views = {id(tensor): self._view(part, name, tensor) for part, name, tensor in places}
        built = {key: view for key, view in views.items() if view is not None}
        views = {id(tensor): self._loaded.view(tensor) for *_, tensor in places}
        loaded = {key: view for key, view in views.items() if view is not None}
        values = _values(self._built, {k: view for k, view in built.items() if k not in loaded})
        values |= _values(self._loaded, loaded)
        wants_hook = self._hook is not None and len(loaded) < len(views)
        if wants_hook or len(values) < len(views):
            own = {key: value.clone() for key, value in values.items() if key in loaded}
            return {**self._initialized(parts, places, values, seed, prefix), **own}
        return values

    def _view(self, part: nn.Module, name: str, tensor: Tensor) -> View | None:
        """A tensor as it was built; a change of its type may have replaced it since."""
        return self._built.view(tensor) or self._views.get(part, {}).get(name)

    def _real(self, own: set[int], what: str, device: torch.device, leaf: Any) -> Any:
        """What stands in an attribute, on a device; ``own``: parameters and buffers by ``id``."""
        if not _is_on_meta(leaf) or id(leaf) in own:
            return leaf
        if isinstance(leaf, torch.device):  # that of a metric, for one
            return device
        view = self._built.view(leaf)
        if view is None and leaf.numel():
            raise Unbuilt(f"the values of {what} can't be recorded")
        made = strides.empty_like(leaf, _HOST) if view is None else self._built.values([view])[0]
        return made.to(device)

    def _initialized(
        self,
        parts: Sequence[nn.Module],
        places: Sequence[tuple[nn.Module, str, Tensor]],
        values: dict[int, Tensor],
        seed: int,
        prefix: str,
    ) -> dict[int, Tensor]:
        """Initialize tensors in the places of those on the meta device, which stay there.

        Args:
            parts: The modules, children before parents.
            places: Where tensors on the meta device stand.
            values: What they begin with, where that is known.
            seed: Of the random numbers.
            prefix: For errors.
        """
        kept = Attributes(parts)
        begun: dict[int, Tensor] = {}
        for part in parts:
            for name, tensor in own_tensors(part):  # those with values aren't to be changed
                is_known = not tensor.is_meta  # what it draws comes from the host's generator, too
                value = tensor.detach().to(_HOST, copy=True) if is_known else values.get(id(tensor))
                entry = begun.setdefault(id(tensor), _begun(tensor, value))
                _entries(part, name)[name] = entry
        try:
            with torch.no_grad(), preserved(_HOST), _Writes() as writes:
                torch.default_generator.manual_seed(seed)
                unknown = {part for part, _, tensor in places if id(tensor) not in values}
                self._initialize(parts, unknown)
            for part, name, tensor in places:
                value = _entries(part, name)[name]
                is_set = value is not begun[id(tensor)] or id(tensor) in values
                if value is None or not (is_set or writes.changed(value) or not value.numel()):
                    raise Unbuilt(_unbuilt(part, name, prefix))
                values[id(tensor)] = value.detach()
            return values
        finally:
            kept.restore()

    def _initialize(self, parts: Sequence[nn.Module], unknown: set[nn.Module]) -> None:
        whole = [part for part in parts if _own_hook(part) is not None]
        done = {inside for part in whole for inside in part.modules() if inside is not part}
        for part in parts:
            initialize = _initializer(part)
            if initialize and part not in done and not unknown.isdisjoint(part.modules()):
                initialize()
        if self._hook is not None:
            for part in parts:
                self._hook(part)


_known: WeakKeyDictionary[nn.Module, LazyModule] = WeakKeyDictionary()


def tensors_on_meta(parts: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters and buffers that stand on the meta device, and that no other stage holds."""
    for part in parts:
        for name, tensor in own_tensors(part):
            if tensor.is_meta and not is_elsewhere(tensor):
                yield part, name, tensor


def children_first(module: nn.Module, without: nn.Module | None = None) -> dict[nn.Module, None]:
    """A module and those inside, children before parents, each once.

    Args:
        module: The outermost.
        without: One that is left out with all in it.
    """
    found: dict[nn.Module, None] = {}
    for child in module.children():
        if child is not without:
            found.update(children_first(child, without))
    return {**found, module: None}


class _Writes(TorchDispatchMode):
    """Notes which tensors are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed: set[int] = set()

    def changed(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._changed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        written = written_by(func, args, kwargs or {})
        self._changed.update(tensor.untyped_storage()._cdata for tensor in written)
        return func(*args, **kwargs or {})


def _own_hook(part: nn.Module) -> Callable[[], Any] | None:
    """``init_weights()`` of a module that initializes all in it."""
    hook = getattr(part, "init_weights", None)
    return hook if callable(hook) and _takes(hook, 0) else None


def _initializer(part: nn.Module) -> Callable[[], Any] | None:
    """What initializes a module, by the names that PyTorch has for it."""
    names = "reset_parameters", "_reset_parameters"
    found = [getattr(part, name, None) for name in names]
    return next((hook for hook in (_own_hook(part), *found) if callable(hook)), None)


def _takes_module(hook: Any) -> bool:
    return callable(hook) and not _takes(hook, 0) and _takes(hook, 1)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _begun(tensor: Tensor, value: Tensor | None) -> Tensor:
    """What is initialized in the place of a tensor on the meta device."""
    if value is None:
        value = strides.empty_like(tensor, _HOST)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _values(recording: Recording, views: dict[int, View]) -> dict[int, Tensor]:
    return dict(zip(views, recording.values(list(views.values())), strict=True))


def _entries(part: nn.Module, name: str) -> dict[str, Any]:
    return part._parameters if name in part._parameters else part._buffers


def attributes_on_meta(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The attributes in which a module, or one inside, holds other tensors on the meta device."""
    own = _ids_of(module)
    return [
        (part, name)
        for part in module.modules()
        for name, value in part.__dict__.items()
        if name not in OF_MODULES
        and any(_is_on_meta(leaf) and id(leaf) not in own for leaf in tree_iter(value))
    ]


def _ids_of(module: nn.Module) -> set[int]:
    """Its parameters and buffers."""
    return {id(tensor) for part in module.modules() for _, tensor in own_tensors(part)}


def _hides_meta(value: Any, own: set[int]) -> bool:
    """Whether objects in an attribute, such as a distribution, hold tensors on the meta device."""
    leaves = islice(_in_objects(value, _DEPTH), _MANY)
    return any(isinstance(leaf, Tensor) and leaf.is_meta and id(leaf) not in own for leaf in leaves)


def _in_objects(value: Any, depth: int) -> Iterator[Any]:
    """What stands in an attribute, and in the objects there."""
    for leaf in tree_iter(value):
        yield leaf
        if depth and not isinstance(leaf, (Tensor, nn.Module, type, ModuleType)):
            yield from _in_objects([*(attributes_of(leaf) or {}).values()], depth - 1)


def _is_on_meta(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "meta"


def _unbuilt(part: nn.Module, name: str, prefix: str) -> str:
    return (
        f"'{name}' of {type(part).__name__} in '{prefix}' stands on the meta device and gets no"
        f" value: {type(part).__name__} has no reset_parameters() that sets it. Give it one, or"
        " give the LightningModule a method init_weights(self, module) that initializes each module"
        " that it is called with; or build the layers in configure_model() without"
        " torch.device('meta')."
    )
