"""The hooks around the forwards of layers: a recompute must run those of its forward.

A step may put one on for a call of the backbone and take it off again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import nn

from lightning_gpipe.tensors import hooks

_KINDS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
#: The hooks of each module that has any, by its number and their kind.
Hooks: TypeAlias = dict[tuple[int, str], dict[int, Any]]


class LayerHooks:
    """Keeps which hooks modules had for recomputes.

    Args:
        modules: The modules of the stage.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._count: Any = None
        self._last: Hooks = {}

    def met(self) -> Hooks:
        """Those that there are now: the same object if they are the same as before."""
        count = hooks.all_changes()
        if count != self._count:
            self._count, found = count, self._found()
            if found != self._last:
                self._last = found
        return self._last

    def restored(self, met: Hooks) -> AbstractContextManager[None]:
        """Let modules have those of a forward, inside this context.

        Args:
            met: What :meth:`met` gave before it.
        """
        now = self.met()
        return nullcontext() if now is met else self._put(now, met)

    @contextmanager
    def _put(self, now: Hooks, met: Hooks) -> Iterator[None]:
        places = now.keys() | met.keys()
        try:
            self._set({place: met.get(place, {}) for place in places})
            yield
        finally:
            self._set({place: now.get(place, {}) for place in places})

    def _set(self, wanted: Hooks) -> None:
        for (number, kind), entries in wanted.items():
            there = getattr(self._modules[number], kind)
            there.clear()
            there.update(entries)

    def _found(self) -> Hooks:
        return {
            (number, kind): dict(entries)
            for number, module in enumerate(self._modules)
            for kind in _KINDS
            if (entries := getattr(module, kind))
        }
