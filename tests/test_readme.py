"""The README's figures are those of the benchmarks' tables."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = (
    "lightning-gpipe, searched, V=1",
    "lightning-gpipe, micro-batch step",
    "lightning-gpipe, micro-batch step, 1f1b",
)


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows."""
    return [
        [re.sub(r"[*¹²]", "", cell).strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|--")
    ]


def measured() -> list[tuple[str, dict[str, str]]]:
    """Of every table of the benchmarks its title, and of each row the first figure."""
    parts = re.split(r"^\*\*(.*)\*\*$", (ROOT / "docs/benchmarks.md").read_text(), flags=re.M)[1:]
    tables = (rows(part.split("\n#")[0]) for part in parts[1::2])
    found = [{row[0]: row[1] for row in table[1:] if len(row) > 1} for table in tables]
    return list(zip(parts[::2], found, strict=True))


def test_figures_are_of_one_run() -> None:
    section = (ROOT / "README.md").read_text().split("## Beside other packages")[1].split("\n#")[0]
    (_, _, *peers), *lines = rows(section)
    compared = [line for line in lines if re.search(r"K=\d+ M=\d+", line[0])]
    assert len(compared) == 8
    for name, own, *others in compared:
        model, size = name.removeprefix("memory: ").split(", ")
        title = f"{', '.join([model, *size.split()])}, always"
        title = re.sub("^emulated devices", r"Emulated devices of .*", title)
        title += ": peak, MB" if name.startswith("memory") else ""
        assert any(
            re.fullmatch(title, where)
            and own in [table.get(ours) for ours in OURS]
            and all(
                table.get(peer) == other for peer, other in zip(peers, others, strict=True) if other
            )
            for where, table in measured()
        ), name
        assert all(float(own) <= float(other) for other in others if other), name
