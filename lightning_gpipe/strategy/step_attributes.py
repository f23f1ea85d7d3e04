"""Looks for attributes that a step reads as the step of the micro-batch before has left them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.layer_state import is_held, places_of
from lightning_gpipe.model.places import NOTHING, Contents, Entry, Place, has_values, is_other
from lightning_gpipe.model.remote import origin_of
from lightning_gpipe.strategy.step_buffers import CHANGED

_CONTAINERS = (list, dict, deque)
#: What is kept for the mini-batch otherwise.
_KEPT_APART = (_NormBase, Metric, MetricCollection)


class StepAttributes:
    """Warns, once, of an attribute outside the backbone that training steps read and then change.

    That is one which the steps of two micro-batches change, and the second reads before it sets it:
    a state that is carried from batch to batch, or a running mean. What stands in an object, a
    class, a list, a dict or a global is taken to be read, unless it wants a gradient.

    Args:
        module: The user's module.
        backbone: The backbone's name.
    """

    def __init__(self, module: nn.Module, backbone: str) -> None:
        self._module, self._backbone = module, backbone
        self._count, self._is_told = 0, False
        self._states: list[tuple[Place, Contents]] = []
        self._watches: dict[tuple[type, str], _Watch] = {}

    @contextmanager
    def followed(self, m: int) -> Iterator[None]:
        """Look before and after the step of a micro-batch, if that is due."""
        with torch._C.DisableTorchFunction():  # what looks calls isn't the step's
            self._begin(m)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():
                self._end(m)

    def _begin(self, m: int) -> None:
        if m == 0:
            self._count += 1
            looks = not self._is_told and is_due(self._count)
            self._states = [(p, _contents(p)) for p in self._places()] if looks else []
        elif m == 1:
            self._states = [
                (place, {name: now[name] for name in now if _is_other(before.get(name), now[name])})
                for place, before in self._states
                for now in [_contents(place)]
            ]
            self._watch()

    def _end(self, m: int) -> None:
        if m != 1:
            return
        for watch in self._watches.values():
            watch.release()
        states, self._states = self._states, []
        told = [text for place, before in states for text in self._changed(place, before)]
        self._watches.clear()
        if told:
            self._is_told = True
            rank_zero_warn(CHANGED.format(kind="attribute", name=told[0]))

    def _places(self) -> Iterator[Place]:
        body = self._module.get_submodule(self._backbone)
        inside = set(map(type, body.modules()))  # which others look at
        places = [p for p in places_of(self._module, body) if not p.is_large]
        held = set[int]()
        for place in places:
            kind = type(place.value)
            is_wanted = is_held(place) or issubclass(kind, type)
            if is_wanted and not issubclass(kind, _KEPT_APART) and kind not in inside:
                held.update(map(id, place.entries().values()))
                yield place
        for place in places:
            if place.key is not None:
                yield place
        containers = [p for p in places if isinstance(p.value, _CONTAINERS) and p.key is None]
        while inner := [p for p in containers if id(p.value) in held]:  # and those inside them
            containers = [p for p in containers if id(p.value) not in held]
            for place in inner:
                held.update(map(id, place.entries().values()))
                yield place

    def _watch(self) -> None:
        """Let the modules' classes note what is read of what has changed."""
        for place, changed in self._states:
            for name in changed if isinstance(place.value, nn.Module) else ():
                key = type(place.value), name
                watch = self._watches.get(key) or _Watch.of(*key)
                if watch is not None:
                    self._watches[key] = watch
                    watch.add(place.value)

    def _changed(self, place: Place, before: Contents) -> Iterator[str]:
        """What the second step has changed of that, too, and read."""
        now = _contents(place)
        for name, entry in before.items():
            watch = self._watches.get((type(place.value), name))
            is_read = watch is None or watch.is_read(place.value)
            if is_read and name in now and _is_other(entry, now[name]):
                yield self._text(place, name)

    def _text(self, place: Place, name: Any) -> str:
        """How the user calls an entry of a place."""
        if place.value is self._module or place.key is not None:
            return str(name)
        is_container = isinstance(place.value, _CONTAINERS)
        return f"{place.name}[{name!r}]" if is_container else f"{place.name}.{name}"


class _Watch:
    """Stands in a class for an attribute of its objects; notes which read it before they set it.

    Args:
        kind: The class.
        name: The attribute, which stands in the objects' ``__dict__``.
    """

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._of_class = getattr_static(kind, name, NOTHING)
        self._own = vars(kind).get(name, NOTHING)
        self._waits = set[int]()
        self._read = set[int]()

    @classmethod
    def of(cls, kind: type, name: str) -> _Watch | None:
        """Begin to watch; None: that can't be, or something of the class's takes its place."""
        watch = cls(kind, name)
        if hasattr(type(watch._of_class), "__set__") and not isinstance(watch._of_class, cls):
            return None
        try:
            setattr(kind, name, watch)
        except (AttributeError, TypeError):
            return None
        return watch

    def add(self, value: Any) -> None:
        """Watch that of an object."""
        self._waits.add(id(value))

    def is_read(self, value: Any) -> bool:
        """Whether that of an object was read before it was set."""
        return id(value) in self._read

    def release(self) -> None:
        """Let the class be what it was."""
        if vars(self._kind).get(self._name) is not self:
            return  # others have set another one
        if self._own is NOTHING:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._own)

    def __get__(self, value: Any, kind: Any = None) -> Any:
        if id(value) in self._waits:
            self._waits.discard(id(value))
            self._read.add(id(value))
        if value is not None and self._name in vars(value):
            return vars(value)[self._name]
        if self._of_class is NOTHING:
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self._name!r}")
        bind = getattr(type(self._of_class), "__get__", None)
        return self._of_class if bind is None else bind(self._of_class, value, kind)

    def __set__(self, value: Any, new: Any) -> None:
        self._waits.discard(id(value))
        vars(value)[self._name] = new

    def __delete__(self, value: Any) -> None:
        self._waits.discard(id(value))
        if self._name not in vars(value):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {self._name!r}")
        del vars(value)[self._name]


def _contents(place: Place) -> Contents:
    """What stands in a place, and where values come from that other stages change in place."""
    return {
        name: (value, (mark, origin_of(value) if issubclass(type(value), Tensor) else None))
        for name, (value, mark) in place.contents(False).items()
    }


def _is_other(before: Entry | None, now: Entry) -> bool:
    """Whether something else stands in a place; a small tensor of the same values is the same.

    What wants a gradient isn't carried to the next batch: its graph is gone then.
    """
    if issubclass(type(now[0]), Tensor) and now[0].requires_grad:
        return False
    if before is None or not is_other(before, now):
        return before is None
    old, new = before[0], now[0]
    are_alike = type(old) is type(new) is Tensor and old is not new
    return not (are_alike and has_values(old) and has_values(new) and old.equal(new))
