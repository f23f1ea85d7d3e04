"""The figures of a run, on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpipe.monitor.figures import Figures
from lightning_gpipe.plan.model_memory import human_bytes
from lightning_gpipe.plan.report import table_lines

_HEADER = ["Stage", "Busy, ms", "of the time", "Waits, ms", "Peak memory"]


def show(figures: Figures, hints: Sequence[str]) -> None:
    """Print figures and hints, with rich where it is installed."""
    title, rows = _title(figures), _rows(figures)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(figures, hints))
        return
    table, console = Table(), Console()
    for name in _HEADER:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)
    for hint in hints:
        console.print(f"Hint: {hint}", markup=False, highlight=False, soft_wrap=True)


def plain(figures: Figures, hints: Sequence[str]) -> str:
    """The same as text."""
    lines = table_lines(_HEADER, _rows(figures))
    return "\n".join([_title(figures), *lines, *(f"Hint: {hint}" for hint in hints)])


def _title(figures: Figures) -> str:
    expected = figures.expected_bubble
    known = "" if expected is None else f" (expected {expected:.1%})"
    count = figures.batches
    return (
        f"GPipe, {count} mini-batch{'es' * (count > 1)} of {1e3 * figures.batch_s:.1f} ms:"
        f" bubble {figures.bubble:.1%}{known}, imbalance {figures.imbalance:.1%},"
        f" {figures.samples_per_s:.4g} samples/s"
    )


def _rows(figures: Figures) -> list[list[str]]:
    """A row a stage."""
    return [
        [
            str(k),
            f"{1e3 * stage.busy_s:.1f}",
            f"{stage.busy_s / figures.batch_s:.0%}",
            f"{1e3 * stage.wait_s:.1f}",
            human_bytes(stage.peak_bytes),
        ]
        for k, stage in enumerate(figures.stages)
    ]
