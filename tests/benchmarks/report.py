"""Tables of figures: on the screen, and kept with how they were made."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


@dataclass
class Table:
    """Figures.

    Args:
        title: What was measured.
        columns: Names of the figures.
        rows: Of each contestant its name and figures; no figures, but a word, if it couldn't run.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[float] | str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"### {self.title}", "", f"| | {' | '.join(self.columns)} |"]
        lines.append("|---" * (len(self.columns) + 1) + "|")
        for name, figures in self.rows:
            cells = [figures] if isinstance(figures, str) else list(map(_shown, figures))
            cells += [""] * (len(self.columns) - len(cells))
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join([*lines, ""])


def save(tables: Sequence[Table], path: Path, command: str) -> None:
    """Keep tables as JSON, with the command, the date, the machine and the versions."""
    path.write_text(
        json.dumps({**surroundings(command), "tables": [asdict(t) for t in tables]}, indent=1)
    )


def surroundings(command: str) -> dict[str, str]:
    """What made figures."""
    versions = {name: _version(name) for name in ("torch", "lightning", "torchgpipe", "deepspeed")}
    return {
        "command": command,
        "date": str(date.today()),
        "hardware": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {_accelerator()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in versions.items() if v)]
        ),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _accelerator() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _shown(figure: float) -> str:
    if figure != figure:
        return ""
    return (
        f"{figure:.0f}"
        if abs(figure) >= 100
        else f"{figure:.3g}"
        if abs(figure) >= 10
        else f"{figure:.3f}"
    )
