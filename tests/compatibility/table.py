"""Checks that docs/compatibility.md has a row for all of the installed Lightning, and a test each.

python -m tests.compatibility.table
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import lightning as L
from lightning.fabric.plugins import environments
from lightning.pytorch import callbacks, loggers, plugins, profilers

from tests.compatibility import (
    test_callbacks,
    test_features,
    test_hooks,
    test_idioms,
    test_loggers,
    test_plugins,
    test_trainer,
)
from tests.compatibility.rows import Refused, Row, Rows

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"
STATUSES = ("works", "differs", "refused", "not tested")
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<status>[^|]+?) \| ?(?P<note>.*?) ?\|$")
#: Names of Lightning that are no kind of their own.
_OTHER_DEVICES = {"XLAEnvironment", "XLAProfiler"}

Table = dict[str, dict[str, tuple[str, str]]]

ROWS: dict[str, Rows] = {
    "Trainer arguments": test_trainer.ROWS,
    "Callbacks": test_callbacks.ROWS,
    "Loggers": test_loggers.ROWS,
    "Plugins and profilers": test_plugins.ROWS,
    "Features": test_features.ROWS,
    "Idioms": test_idioms.ROWS,
}


def read(text: str) -> Table:
    """The table: for each section its rows, each with its status and its note."""
    table: Table = {}
    rows: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = table.setdefault(line.removeprefix("## "), {})
        elif match := _ROW.match(line):
            rows[match["name"]] = match["status"], match["note"]
    return table


def of_lightning() -> dict[str, set[str]]:
    """What the installed Lightning has."""
    plugin_names = {*plugins.__all__, *profilers.__all__, *_classes(environments)}
    return {
        "Trainer arguments": {*inspect.signature(L.Trainer.__init__).parameters} - {"self"},
        "Callbacks": {*callbacks.__all__},
        "Loggers": {*loggers.__all__},
        "Plugins and profilers": plugin_names - _OTHER_DEVICES,
        **{section: {*names} for section, names in test_hooks.HOOKS.items()},
    }


def _classes(module: object) -> Iterable[str]:
    return (name for name, value in vars(module).items() if isinstance(value, type))


def problems(table: Table) -> list[str]:
    """What is missing or wrong in a table."""
    found = []
    for section, names in of_lightning().items():
        for name in sorted(names - table.get(section, {}).keys()):
            found.append(f"{section}: no row for {name}")
    for section, rows in table.items():
        for name, (status, note) in rows.items():
            if status not in STATUSES:
                found.append(f"{section}, {name}: {status!r} is none of {STATUSES}")
            if status != "works" and not note:
                found.append(f"{section}, {name}: no word on why it is {status!r}")
    for section, tests in ROWS.items():
        found += _untested(section, tests, table.get(section, {}))
    return found


def _untested(section: str, tests: Rows, rows: dict[str, tuple[str, str]]) -> list[str]:
    found = [f"{section}: no row for the test {name}" for name in tests.keys() - rows.keys()]
    for name, (status, note) in rows.items():
        test = tests.get(name)
        if test is None:
            if status != "not tested":
                found.append(f"{section}, {name}: no test of this name")
        elif isinstance(test, Refused) and (status != "refused" or test.message not in note):
            found.append(f"{section}, {name}: refused with {test.message!r}, which isn't there")
        elif isinstance(test, Row) and status != "works":
            found.append(f"{section}, {name}: the test shows that it works")
    return found


def main() -> int:
    """Print what is wrong."""
    table = read(PATH.read_text())
    found = problems(table)
    for line in found:
        print(line)
    rows = sum(len(rows) for rows in table.values())
    if not found:
        print(f"{rows} rows, Lightning {L.__version__}: complete, and each with a test")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
