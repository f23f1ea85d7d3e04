"""Takes the place of modules' forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_gpipe.model.blocks import Blocks


class Redirect:
    """Stands in for a module's ``forward``; copies of the module share it."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        return self._target(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Redirect:
        return self


class Redirections:
    """The forwards that are redirected, and those that they had before.

    :class:`Blocks` have no forward: what their loop calls is redirected.
    """

    def __init__(self) -> None:
        self._targets: dict[nn.Module, Callable[..., Any]] = {}
        self._originals: dict[nn.Module, Any] = {}

    def add(self, module: nn.Module, target: Callable[..., Any]) -> None:
        """Let calls of a module go to a function, until :meth:`remove`."""
        self._targets[module] = target
        if isinstance(module, Blocks):
            module.attach(target)
            return
        # a forward of the instance's own: torch.compile sets one, and users do
        previous = module.__dict__.get("forward")
        self._originals.setdefault(module, None if isinstance(previous, Redirect) else previous)
        module.__dict__["forward"] = Redirect(target)

    def remove(self, module: nn.Module) -> None:
        """Let calls of a module go to its own forward again."""
        if self._targets.pop(module, None) is None:
            return
        if isinstance(module, Blocks):
            module.detach()
            return
        module.__dict__.pop("forward", None)
        original = self._originals.pop(module, None)
        if original is not None:
            module.__dict__["forward"] = original

    def clear(self) -> None:
        """Take all back."""
        for module in list(self._targets):
            self.remove(module)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let modules be called as if nothing were redirected."""
        targets = dict(self._targets)
        self.clear()
        try:
            yield
        finally:
            for module, target in targets.items():
                self.add(module, target)


def not_alone(*args: Any, **kwargs: Any) -> Any:
    """The forward of a layer that another stage holds."""
    raise RuntimeError(
        "A layer of the backbone was called by itself, and the layers are on several stages: call"
        " the backbone as a whole."
    )
