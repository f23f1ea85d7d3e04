"""Python imports this where it starts: torchmetrics imports faster in processes that tests start.

It imports torchvision, transformers and SciPy wherever they are installed, for metrics that no test
uses, and a script takes a third longer to start. Tests that need them import them by themselves.
"""

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
imports.package_available = lambda name: name not in _UNWANTED and _package_available(name)
