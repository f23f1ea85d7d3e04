"""Python imports this where it starts: what costs time in every process that tests start is left.

torchmetrics imports torchvision, transformers, SciPy and Matplotlib wherever they are installed,
for metrics and plots that no test uses, and a script takes a third longer to start. Tests that need
them import them by themselves. And every Trainer reads the entry points of all installed packages:
here a process reads them once. What torch and Lightning make as they are imported stays, and to
look for garbage among it, then and at the end, takes as long as the import itself.
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from lightning_utilities.core import imports

_UNWANTED = {"torchvision", "transformers", "scipy", "matplotlib"}
_LARGE = {"torch", "lightning", "lightning_gpipe"}
_Cache = imports.RequirementCache
_check, _package_available = _Cache._check_available, imports.package_available


def _check_available(self: Any) -> None:
    if str(self.requirement).split(">=")[0] in _UNWANTED:
        self.available, self.message = False, "left out"
    else:
        _check(self)


_Cache._check_available = _check_available  # type: ignore[method-assign]
metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
imports.package_available = lambda name: name not in _UNWANTED and _package_available(name)


class _Finder(MetaPathFinder):
    """Finds the packages that make the most."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _LARGE else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(_without_collections, loader.exec_module)
        return spec


def _without_collections(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    was_on = gc.isenabled()
    gc.disable()
    try:
        load(module)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


sys.meta_path.insert(0, _Finder())
