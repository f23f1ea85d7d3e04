"""Plots of what the tables say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.paper import published
from examples.paper.memory import MB, Point, expected, fitted

PAPER, OURS, OTHER = "#8795a1", "#c0392b", "#e59866"


def _saved(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _figure(columns: int, width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid[0]


def throughput(
    simulated: dict[str, dict[int, list[float]]],
    emulated: dict[str, dict[int, list[float]]],
    path: Path,
) -> None:
    """Table 2 as bars."""
    figure, row = _figure(len(simulated), 9.5, 3.6)
    cases = [(m, k) for m in published.MICRO_BATCHES for k in published.STAGES]
    for axes, name in zip(row, simulated, strict=True):
        for i, (what, found, colour) in enumerate(
            (
                ("paper, on TPUs", published.FAST[name], PAPER),
                ("simulated", simulated[name], OURS),
                ("emulated devices", emulated[name], OTHER),
            )
        ):
            heights = [found[m][published.STAGES.index(k)] for m, k in cases]
            places = [4 * case + case // 3 + i for case in range(len(cases))]
            axes.bar(places, heights, 0.95, color=colour, label=what)
        ticks = [4 * case + case // 3 + 1 for case in range(len(cases))]
        axes.set_xticks(ticks, [f"K={k}" for _, k in cases], fontsize=8)
        for i, m in enumerate(published.MICRO_BATCHES):
            axes.text(ticks[3 * i + 1], -0.11, f"M={m}", ha="center", va="top", fontsize=9,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, 6.8)
    row[0].set_ylabel("throughput, of K=2 and M=1")
    row[0].legend(fontsize=8, frameon=False, loc="upper left")
    _saved(figure, path)


def memory(points: Sequence[Point], path: Path) -> None:
    """What stages hold over M, and against the formula."""
    factors = fitted(points)
    figure, (left, right) = _figure(2, 9.5, 3.8)
    depth, texts = max(p.layers for p in points), max(p.texts for p in points)
    colours = ["#1b4f72", "#2e86c1", "#c0392b", "#e59866"]
    stages = sorted({p.stages for p in points})
    for k, colour in zip(stages, colours, strict=False):
        here = sorted(
            (p for p in points if (p.layers, p.texts, p.stages) == (depth, texts, k)),
            key=lambda p: p.chunks,
        )
        chunks = [p.chunks for p in here]
        formula = [expected(p, factors) / MB for p in here]
        left.plot(chunks, formula, color=colour, linewidth=1)
        left.plot(chunks, [p.held / MB for p in here], "o", color=colour, label=f"K={k}")
        all_here = [p for p in points if p.stages == k]
        right.plot(
            [expected(p, factors) / MB for p in all_here],
            [p.held / MB for p in all_here],
            "o", color=colour, markersize=4, label=f"K={k}",
        )  # fmt: skip
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    ticks = sorted({p.chunks for p in points})
    left.set_xticks(ticks, [f"{m}" for m in ticks])
    left.set_xlabel("micro-batches, M")
    left.set_ylabel("activations of the fullest stage, MB")
    left.set_title(f"L={depth}, N={texts}: planned (points), formula (lines)", fontsize=9)
    ends = [min(p.held for p in points) / MB, max(p.held for p in points) / MB]
    right.plot(ends, ends, color="#555555", linewidth=1)
    right.set_xscale("log")
    right.set_yscale("log")
    right.xaxis.set_major_locator(_ticks())
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("")
    right.set_xlabel("formula, MB")
    right.set_ylabel("planned, MB")
    right.set_title("all L and N", fontsize=9)
    for axes in (left, right):
        axes.yaxis.set_major_locator(_ticks())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.legend(fontsize=8, frameon=False)
    _saved(figure, path)


def largest(found: dict[str, list[tuple[str, float, float]]], path: Path) -> None:
    """The largest models.

    Args:
        found: Of each kind of model and number of stages its name, and parameters here and in the
            paper, in billions.
        path: Of the plot.
    """
    figure, row = _figure(len(found), 9.5, 3.4)
    for axes, (name, sizes) in zip(row, found.items(), strict=True):
        places = range(len(sizes))
        for shift, column, what, colour in ((-0.2, 2, "paper", PAPER), (0.2, 1, "here", OURS)):
            heights = [size[column] for size in sizes]
            bars = axes.bar([i + shift for i in places], heights, 0.38, color=colour, label=what)
            axes.bar_label(bars, [_short(h) if h else "" for h in heights], fontsize=7)
            for i, height in enumerate(heights):
                if not height:
                    axes.text(i + shift, 0.01, "none", ha="center", color=colour, fontsize=7,
                              transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks([*places], [size[0] for size in sizes], fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.margins(y=0.12)
    row[0].set_ylabel("parameters, billions")
    row[0].legend(fontsize=8, frameon=False, loc="upper left")
    _saved(figure, path)


def _ticks() -> Any:
    """1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5))


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
