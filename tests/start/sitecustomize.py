"""Python imports this where it starts: what costs time in every process that tests start is left.

torchmetrics imports torchvision, transformers and SciPy wherever they are installed, for metrics
that no test uses, and a script takes a third longer to start. Tests that need them import them by
themselves. And every Trainer reads the entry points of all installed packages: here a process reads
them once.
"""

import functools
from importlib import metadata
from typing import Any

from lightning_utilities.core import imports

_UNWANTED = {"torchvision", "transformers", "scipy"}
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
