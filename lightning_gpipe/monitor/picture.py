"""A timeline as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import fsspec

from lightning_gpipe.monitor.trace import Timeline, begin_of
from lightning_gpipe.schedule.measured import Measured

COLOURS = {"F": "#4c9f70", "R": "#e9c46a", "I": "#5e81c1", "W": "#9b7fc7", "B": "#3d5a99"}
_MEANINGS = {
    "F": "F forward",
    "R": "R recompute",
    "I": "I gradient of the input",
    "W": "W gradient of the weights",
    "B": "B backward",
}
_WAIT, _OUTSIDE = "#d9d9d9", "#c97b63"
_WIDTH, _ROW, _DPI = 16.0, 0.6, 120  # inches
#: Share of the picture's width that a letter takes.
_WRITTEN = 0.0055


def require() -> None:
    """Check that pictures can be drawn.

    Raises:
        ModuleNotFoundError: If matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "Pictures of a pipeline need matplotlib: pip install 'lightning-gpipe[monitor]', or"
            " PipelineMonitor(picture=False) for the trace alone."
        )


def draw(timelines: Sequence[Timeline], title: str, path: str) -> Any:
    """Draw the timelines of all ranks, a row each, and save them as PNG.

    Args:
        timelines: The ranks, from the top.
        title: Stands above.
        path: Where to.

    Returns:
        The picture as an array ``[height, width, 3]`` of bytes.
    """
    require()
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(_WIDTH, 1.6 + _ROW * len(timelines)), dpi=_DPI, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    begin, actions = begin_of(timelines), [_actions(line) for line in timelines]
    length = max((one.done - begin for row in actions for one in row), default=1.0)
    for row, ran in enumerate(actions):
        has_parts = len({one.action.stage for one in ran}) > 1
        for spans, colour in _bars(ran, begin):
            axes.broken_barh(
                spans, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4
            )
        for one in ran:
            text = repr(one.action) if has_parts else f"{one.action.op}{one.action.micro_batch}"
            if one.end - one.begin > _WRITTEN * len(text) * length and not one.is_outside:
                middle = 1e3 * ((one.begin + one.end) / 2 - begin)
                colour = "black" if one.action.op == "R" else "white"
                axes.text(middle, row, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(range(len(timelines)), [line.name for line in timelines])
    axes.set_ylim(len(timelines) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * length)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    ops = {one.action.op for row in actions for one in row}
    shown = [Patch(color=COLOURS[op], label=_MEANINGS[op]) for op in COLOURS if op in ops]
    shown.append(Patch(color=_WAIT, label="wait"))
    if any(one.is_outside for row in actions for one in row):
        shown.append(Patch(color=_OUTSIDE, label="step, outside the backbone"))
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=8)
    canvas.draw()
    with fsspec.open(path, "wb") as file:
        figure.savefig(file, format="png")
    return numpy.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _actions(line: Timeline) -> list[Measured]:
    return [one for batch in line.batches for one in batch]


def _bars(ran: Sequence[Measured], begin: float) -> list[tuple[list[tuple[float, float]], str]]:
    """Milliseconds and lengths of a row's bars, by their colour."""
    bars: dict[str, list[tuple[float, float]]] = {}

    def add(colour: str, start: float, end: float) -> None:
        if end > start:
            bars.setdefault(colour, []).append((1e3 * (start - begin), 1e3 * (end - start)))

    for one in ran:
        add(_WAIT, one.start, one.begin)
        add(_WAIT, one.end, one.done)
        add(_OUTSIDE if one.is_outside else COLOURS[one.action.op], one.begin, one.end)
    return [(spans, colour) for colour, spans in bars.items()]
