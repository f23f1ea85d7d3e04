"""Writes docs/paper.md and its plots."""

from __future__ import annotations

import argparse
import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from examples.paper import memory, plots, published, sizes, speed, timed
from examples.paper.models import CHUNKS, LENGTH, AmoebaNet, Transformer, plans
from examples.paper.tables import GIB, Table
from tests.benchmarks.report import surroundings

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = "AmoebaNet-D (18, 256)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.paper", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the times measured before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    (arguments.docs / "paper").mkdir(parents=True, exist_ok=True)
    kept = arguments.docs / "paper" / "timed.json"
    if not arguments.keep:  # first of all: what has computed can't fork
        kept.write_text(json.dumps(measured(), indent=1) + "\n")
    text = document(json.loads(kept.read_text()), arguments.docs / "paper")
    (arguments.docs / "paper.md").write_text(text)


def measured() -> dict[str, Any]:
    """What takes time by the clock."""
    recomputes, throughput = timed.recomputes(), timed.emulated()
    made = surroundings("python -m examples.paper")
    return {**made, "recomputes": asdict(recomputes), "throughput": throughput}


def document(kept: dict[str, Any], folder: Path) -> str:
    """The page; plots go to a folder."""
    emulated = {
        name: {int(m): row for m, row in rows.items()} for name, rows in kept["throughput"].items()
    }
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        largest = workers.map(sizes.largest, (True, False))
        found = speed.models()
        simulated = {name: speed.throughputs(model) for name, model in found.items()}
        points = memory.sweep()
        per_text, per_layer = memory.fitted(points)
        tables: dict[str, object] = {
            "amoebanets": sizes.of_paper("(L, D)", AmoebaNet, published.AMOEBANETS),
            "transformers": sizes.of_paper("L", Transformer, published.TRANSFORMERS),
            "fast": speed.fast(found, emulated),
            "slow": speed.slow(found),
            "messages": speed.messages(found),
            "bubbles": speed.bubbles(found),
            "recomputes": speed.recomputes(found),
            "recomputes_measured": Table(**kept["recomputes"]),
            "components": speed.components(found),
            "memory": memory.errors(points),
            "naive": memory.naive(),
        }
        fitting: sizes.Largest = {}
        for is_mixed, sizes_of in zip((True, False), largest, strict=True):
            for kind, rows in sizes_of.items():
                fitting.setdefault(kind, {})[is_mixed] = rows
    tables["largest_amoebanets"] = sizes.of_largest("AmoebaNet", fitting)
    tables["largest_transformers"] = sizes.of_largest("Transformer", fitting)
    plots.throughput(simulated, emulated, folder / "throughput.png")
    plots.memory(points, folder / "memory.png")
    plots.largest(sizes.in_billions(fitting), folder / "largest.png")
    figures = {
        "surroundings": f"{kept['date']}; {kept['hardware']}; {kept['versions']}.",
        "chunks": CHUNKS,
        "forward": ", ".join(f"{s:g} s at M={m}" for m, s in timed.FORWARD_S.items()),
        "slow_gbs": f"{speed.SLOW / 1e9:.0f}",
        "rate": speed.RATE / 1e12,
        "points": len(points),
        "grown": fitting["AmoebaNet"][True][-1][2] / fitting["AmoebaNet"][True][1][2],
        "per_text": per_text / memory.MB,
        "per_layer": per_layer / memory.MB,
        **_causes(found, simulated),
    }
    template = Path(__file__).with_name("text.md").read_text()
    return template.format(**tables, **figures)


def _causes(
    found: dict[str, speed.Timed], simulated: dict[str, dict[int, list[float]]]
) -> dict[str, object]:
    """Figures that explain differences."""
    images, texts = found.values()
    naive, first = AmoebaNet(18, 208), AmoebaNet(18, 416)
    sixteen = plans(first, [1], 16, is_mixed=True)[1]
    whole = texts.model.layers[1].layer.attention.heads * LENGTH**2 * 4 / GIB  # type: ignore
    three = Transformer(3)
    del three.layers[-1]
    no_loss = plans(three, [1], 1, "never", is_mixed=True)[1]
    last, paper = simulated["Transformer-48"][CHUNKS], published.FAST["Transformer-48"][CHUNKS]
    fullest = [
        f"the fullest stage of {name} has {max(m.partition(m.settings(8, CHUNKS)).shares):.1%}"
        for name, m in found.items()
    ]
    run = partial(images.run, 8, CHUNKS)
    late = [1 - m.run(8, CHUNKS).length / m.late(8, CHUNKS).length for m in found.values()]
    layers = speed.even(len(images.model.layers), 8)
    return {
        "conv_outputs": f"{sizes.convolved(naive) * 2 / GIB:.1f}",
        "sixteen": f"{sizes.activations(sixteen):.2f}",
        "scores": f"{whole:.3f}",
        "scores_of_stage": f"{13 * whole:.1f}",
        "no_loss": f"{sizes.activations(no_loss):.1f}",
        "bound": 8 * 4 / (4 + 8 - 1),
        "gain": last[-1] / last[0],
        "gain_of_paper": paper[-1] / paper[0],
        "uneven": f"Of all operations, {' and '.join(fullest)}",
        "late": min(late),
        "late_most": max(late),
        "cut": run(balance=layers).length / run().length - 1,
        "searched": run().length / run(schedule="searched").length - 1,
    }


if __name__ == "__main__":
    main()
