"""Writes docs/benchmarks.md and its plots from the figures that were saved."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Table

DOCS = Path(__file__).parents[2] / "docs"
#: Of each suite a heading, what to know, and the figure to plot with its direction.
SUITES = {
    "emulated": (
        "Schedules on emulated devices",
        "Any number of stages runs truly in parallel, because layers sleep: 5 or 20 ms forward, and"
        " twice as long backward. What else processes do, they do on two cores all together, as"
        " those of devices with few cores for each. The bound is the length of fill-drain for what"
        " the stages take by themselves; other schedules may be shorter. *searched* runs the step"
        " once per micro-batch, with one stage on each rank (V=1) or two.",
        ("of the bound", "longer is better"),
    ),
    "compute": (
        "Real computation on two cores",
        "Two stages, one process each. The speed-up is that over one process which accumulates"
        " over the micro-batches, with a checkpoint around each stage where activations are"
        " recomputed. DDP and FSDP hold a whole model, or shards of it, on each process.",
        ("speed-up", "longer is better"),
    ),
    "memory": (
        "Peak memory of each process",
        "Above what the process took before the model was built; pages of libraries don't count."
        " Freed memory goes back at once.",
        ("highest", "shorter is better"),
    ),
    "overhead": (
        "What it costs beside the work",
        "",
        None,
    ),
    "monitor": (
        "What PipelineMonitor costs, and measures",
        "The same processes train one or two mini-batches with it, then without it, and so on. It"
        " logs once in 20 with it; by default it does so once in 50.",
        None,
    ),
}


def arguments_of(parser: argparse.ArgumentParser) -> None:
    """Add the command's own options."""
    parser.add_argument("--docs", type=Path, default=DOCS, help="default: %(default)s")


def run(arguments: argparse.Namespace) -> list[Table]:
    """Write the document."""
    folder: Path = arguments.docs / "benchmarks"
    intro = folder / "intro.md"
    parts = [intro.read_text().rstrip()]
    for suite, (heading, about, plotted) in SUITES.items():
        parts += [f"## {heading}", about]
        for path in sorted(folder.glob(f"{suite}*.json")):
            kept = json.loads(path.read_text())
            tables = [Table(t["title"], t["columns"], t["rows"]) for t in kept["tables"]]
            parts.append(f"    {kept['command']}")
            parts.append(f"{kept['date']}; {kept['hardware']}; {kept['versions']}.")
            if plotted is not None:
                image = path.with_suffix(".png")
                plot(tables, *plotted, image)
                parts.append(f"![{heading}](benchmarks/{image.name})")
            parts += [
                str(table).replace("### ", "**", 1).replace("\n", "**\n", 1).rstrip()
                for table in tables
            ]
    (arguments.docs / "benchmarks.md").write_text("\n\n".join(p for p in parts if p) + "\n")
    return []


def plot(tables: list[Table], column: str, direction: str, path: Path) -> None:
    """Draw a column of each table as bars, ours in colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = 2 if len(tables) < 9 else 4
    down = -(-len(tables) // across)
    height = 0.55 + 0.24 * max(len(t.rows) for t in tables)
    figure, grid = pyplot.subplots(
        down, across, figsize=(5.2 * across, height * down), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(tables) :]:
        axes.axis("off")
    for axes, table in zip(grid.flat, tables, strict=False):
        place = table.columns.index(column)
        rows: list[tuple[str, Any]] = [
            (n, f[place]) for n, f in table.rows if not isinstance(f, str)
        ]
        names, values = [n for n, _ in rows], [v for _, v in rows]
        colours = ["#c0392b" if name.startswith("lightning-gpipe") else "#b8c4ce" for name in names]
        bars = axes.barh(names, values, color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
        axes.invert_yaxis()
        axes.set_title(table.title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{column}; {direction}", fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
