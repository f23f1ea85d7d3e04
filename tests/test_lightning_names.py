"""Private names of Lightning that this package imports exist in the installed version."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_gpipe.strategy import _lightning

PACKAGE = Path(_lightning.__file__).parents[1]


def test_all_names_exist() -> None:
    assert all(hasattr(_lightning, name) for name in _lightning.__all__)


def test_private_names_are_imported_in_one_place() -> None:
    private = re.compile(
        r"^from lightning\.\S* import .*\b_\w+|^from lightning\.\S*\._\S+ import", re.MULTILINE
    )
    users = [path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert users == ["_lightning.py"]
    assert re.search(
        r"^    _init_dist_connection,",
        (PACKAGE / "strategy" / "_lightning.py").read_text(),
        re.MULTILINE,
    )
