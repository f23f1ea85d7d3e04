"""Takes the place of a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Redirect:
    """Stands in for a module's ``forward``; copies of the module share it."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        return self._target(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Redirect:
        return self


def not_alone(*args: Any, **kwargs: Any) -> Any:
    """The forward of a layer that another stage holds."""
    raise RuntimeError(
        "A layer of the backbone was called by itself, and the layers are on several stages: call"
        " the backbone as a whole."
    )
