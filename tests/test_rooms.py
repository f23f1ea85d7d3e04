"""Who may import whom: the rooms of the package, and what each may know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lightning_gpipe

PACKAGE = Path(lightning_gpipe.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"

#: What each room may import of the package, besides itself.
MAY_IMPORT = {
    "schedule": set(),
    "tensors": set(),
    "comm": {"tensors"},
    "model": {"tensors"},
    "plan": {"schedule", "tensors", "model"},
    "engine": {"schedule", "tensors", "comm", "model"},
    "gradients": {"comm", "model", "tensors"},
    "state": {"comm", "model"},
    "failure": {"comm"},
    "monitor": {"schedule", "plan"},
    "pipeline": {
        "schedule",
        "tensors",
        "comm",
        "model",
        "plan",
        "engine",
        "gradients",
        "state",
    },
}
MAY_IMPORT["strategy"] = {*MAY_IMPORT}
MAY_IMPORT["__init__"] = {*MAY_IMPORT}
MAY_IMPORT["cli"] = {"state", "strategy", "monitor"}
MAY_IMPORT["__main__"] = {"cli"}

#: Who alone may import a library. Where a name stands here, so do the names below it.
ONLY_IN = {
    "lightning": {"strategy", "__init__"},
    "torchmetrics": {"strategy"},
    "torch.distributed": {"comm", "engine", "gradients", "state", "failure", "strategy"},
    "torch.nn": {*MAY_IMPORT} - {"schedule", "tensors", "comm", "failure"},
    "torch": {*MAY_IMPORT} - {"schedule"},
}


def modules() -> dict[Path, str]:
    """Every module with its room; a module at the top is a room of its own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).parts
        found[path] = place[0].removesuffix(".py")
    return found


def imports(source: str) -> set[str]:
    """The dotted names that a module imports, at its top, in functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError("imports are absolute, so that this test can read them")
    return found


def breaches(room: str, names: set[str]) -> list[str]:
    """What of a module's imports its room may not know."""
    found = []
    for name in sorted(names):
        package, _, rest = name.partition(".")
        if package == "lightning_gpipe":
            other = rest.split(".")[0]
            if other not in {room, *MAY_IMPORT[room]}:
                found.append(name)
            continue
        for library, rooms in ONLY_IN.items():
            if f"{name}.".startswith(f"{library}.") and room not in rooms:
                found.append(name)
    return found


def test_rooms_import_only_what_they_may() -> None:
    rooms = modules()
    found = {
        str(path.relative_to(PACKAGE)): wrong
        for path, room in rooms.items()
        if (wrong := breaches(room, imports(path.read_text())))
    }
    assert found == {}
    assert set(rooms.values()) == set(MAY_IMPORT), "a room is missing here or in the package"


def test_a_breach_is_seen() -> None:
    lazy = "def f():\n    from lightning_gpipe.engine.stage import Stage"
    assert breaches("comm", imports(lazy)) == ["lightning_gpipe.engine.stage.Stage"]
    assert breaches("schedule", imports("import torch")) == ["torch"]
    assert breaches("tensors", imports("from torch import nn, Tensor")) == ["torch.nn"]
    assert breaches("engine", imports("import lightning.pytorch as pl")) == ["lightning.pytorch"]
    assert breaches("engine", imports("import lightning_utilities")) == []


def test_rooms_stay_small() -> None:
    """No module over 400 lines, no class over 250: a longer one has a seam."""
    long = []
    for path in modules():
        source = path.read_text()
        lines = len(source.splitlines())
        if lines > 400:
            long.append(f"{path.name}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 250:
                    long.append(f"{path.name}, {node.name}: {length} lines")
    assert long == []


def not_implied() -> set[tuple[str, str]]:
    """The table's arrows without those that follow from others."""
    beyond: dict[str, set[str]] = {}

    def reached(room: str) -> set[str]:
        if room not in beyond:
            others = MAY_IMPORT[room] - {room}
            beyond[room] = others.union(*(reached(other) for other in others))
        return beyond[room]

    return {
        (room, other)
        for room in MAY_IMPORT
        for other in MAY_IMPORT[room]
        if not any(other in reached(between) for between in MAY_IMPORT[room])
    }


def test_the_design_draws_the_rooms_as_they_are() -> None:
    (drawing,) = re.findall(r"```mermaid\ngraph TD\n(.*?)```", DESIGN.read_text(), re.DOTALL)
    arrows = re.findall(r"^ +(\w+) --> (\w+)$", drawing, re.MULTILINE)
    assert len(arrows) == len(drawing.splitlines()), "a line that isn't an arrow"
    assert sorted(arrows) == sorted(not_implied())


def test_the_design_names_modules_that_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", DESIGN.read_text()))
    ours = {name for name in named if not name.startswith("tests/")}
    assert len(ours) > 20
    assert sorted(name for name in ours if not (PACKAGE / name).exists()) == []
