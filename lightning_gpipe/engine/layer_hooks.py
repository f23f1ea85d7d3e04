"""The hooks around the forwards of layers: a recompute must run those of its forward.

A step may put one on for a call of the backbone and take it off again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

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
        self._count = -1  # of all hooks that there have been
        self._last: Hooks = {}

    def met(self) -> Hooks:
        """Those that there are now: the same object if they are the same as before."""
        count, last = RemovableHandle.next_id, self._last.items()
        is_same = all(getattr(self._modules[n], kind) == had for (n, kind), had in last)
        if count != self._count or not is_same:
            self._count, found = count, self._found()
            if found != self._last:
                self._last = found
        return self._last

    def kept(self, met: Hooks) -> Hooks:
        """Those of before a forward that it has left: others come and go in the recompute, too.

        Args:
            met: What :meth:`met` gave before it.
        """
        now = self.met()
        if now is met:
            return met
        return {
            place: {i: hook for i, hook in entries.items() if i in now.get(place, {})}
            for place, entries in met.items()
        }

    def restored(self, met: Hooks) -> AbstractContextManager[None]:
        """Let modules have those of a forward, inside this context.

        Args:
            met: What :meth:`kept` gave behind it.
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
