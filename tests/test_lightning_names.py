"""Private names of Lightning that this package imports exist in the installed version."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_gpipe import _lightning

PACKAGE = Path(_lightning.__file__).parent


def test_all_names_exist() -> None:
    assert all(callable(getattr(_lightning, name)) for name in _lightning.__all__)


def test_private_names_are_imported_in_one_place() -> None:
    private = re.compile(
        r"^from lightning\.\S* import .*\b_\w+|^from lightning\.\S*\._\S+ import", re.MULTILINE
    )
    users = [path.name for path in PACKAGE.glob("*.py") if private.search(path.read_text())]
    assert users == ["_lightning.py"]
    assert re.search(
        r"^    _init_dist_connection,", (PACKAGE / "_lightning.py").read_text(), re.MULTILINE
    )


def test_the_core_does_not_import_lightning() -> None:
    allowed = {
        "__init__.py",
        "_lightning.py",
        "strategy.py",
        "processes.py",
        "precision.py",
        "refusals.py",
        "saving.py",
        "callbacks.py",
        "checkpoint.py",
        "signals.py",
        "data.py",
        "monitor.py",
    }
    users = {
        p.name
        for p in PACKAGE.glob("*.py")
        if re.search(r"^(from|import) lightning\b", p.read_text(), re.MULTILINE)
    }
    assert users <= allowed
