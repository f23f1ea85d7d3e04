"""Draws diagrams as SVG while Sphinx builds, without a browser, the network or other programs.

``mermaid`` draws the two kinds of diagrams that the documentation has, so that the same text is a
drawing here and where Markdown is shown as it is. ``schedule`` draws what the package's own
simulator says, and ``command`` prints what a command says of itself.
"""

from __future__ import annotations

import argparse
import re
from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from graphs import graph, sequence
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lightning_gpipe import cli
from lightning_gpipe.plan.schedules import Schedules
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.costs import Costs
from lightning_gpipe.schedule.placement import rounds
from lightning_gpipe.schedule.simulate import simulate

#: Of the text beside the sidebars, in pixels.
_WIDTH = 710
_OPS = {
    "F": "forward",
    "R": "re-materialization",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


class Mermaid(SphinxDirective):
    """A ``graph TD`` of arrows, or a ``sequenceDiagram``."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        kind, *lines = (line.strip() for line in self.content if line.strip())
        if kind == "graph TD":
            return _drawing(graph(lines), "\n".join(lines))
        if kind == "sequenceDiagram":
            return _drawing(sequence(lines), "\n".join(lines))
        raise self.error(f"{kind!r} isn't drawn: a graph TD, or a sequenceDiagram")


class Timeline(SphinxDirective):
    """What stages do when, in a mini-batch."""

    option_spec: ClassVar = {
        "stages": directives.positive_int,
        "chunks": directives.positive_int,
        "virtual": directives.positive_int,
        "checkpoint": directives.unchanged,
        "schedule": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        stages, chunks = self.options["stages"], self.options["chunks"]
        virtual, name = self.options.get("virtual", 1), self.options.get("schedule", "fill_drain")
        checkpoint: Any = self.options.get("checkpoint", "except_last")
        step: Any = "mini-batch" if name == "fill_drain" else "micro-batch"
        settings = Settings(
            chunks, stages, None, "flops", checkpoint, True, virtual, step, schedule=name
        )
        placement = rounds(stages, virtual)
        costs = Costs.of([1.0 / virtual] * len(placement))
        made = Schedules(settings, placement, replicas=1, costs=costs).make(chunks)
        found = simulate(made, costs)
        high, left = 30, 62
        wide = min(26.0, (_WIDTH - left) / found.length)
        width = left + round(found.length * wide) + 8
        height = high * stages + 26
        parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">']
        for k in range(stages):
            y = high * k
            parts.append(f'<text x="0" y="{y + 20}" font-size="13">stage {k}</text>')
        for span in found.spans:
            stage, op, m = span.action
            x, w = left + span.start * wide, (span.end - span.start) * wide
            y = high * span.rank
            label = f"{op}{m}" if w >= 17 else str(m)
            title = f"{_OPS[op]} of micro-batch {m}"
            if virtual > 1:
                title += f", part {stage}"
            shade = 1 - 0.35 * (stage // stages) / max(virtual - 1, 1)
            place = f'x="{x:.1f}" y="{y + 2}" width="{w:.1f}" height="{high - 4}" rx="3"'
            parts.append(
                f'<g><title>{title}</title><rect class="cell" {place} fill="white"/>'
                f'<rect class="cell {op}" {place} fill-opacity="{shade:.2f}"/>'
                f'<text class="on" x="{x + w / 2:.1f}" y="{y + 19}" font-size="11"'
                f' text-anchor="middle">{label}</text></g>'
            )
        parts.append(
            f'<text x="{left}" y="{height - 8}" font-size="12">'
            f"{found.length:g} forwards long, bubble {found.bubble:.0%}</text></svg>"
        )
        return _drawing("".join(parts), f"{name}: {found.length:g} long", "drawing timeline")


class Command(SphinxDirective):
    """The help of a command and of each of its subcommands."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        parser = cli._parser()
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return [
            nodes.literal_block(text := each.format_help().strip(), text, language="text")
            for each in commands.choices.values()
        ]


def _drawing(svg: str, text: str, kind: str = "drawing") -> list[nodes.Node]:
    """A drawing where there is HTML, and its text where there isn't."""
    label = escape(re.sub(r"\s+", " ", text)[:200], quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return [nodes.raw("", f'<div class="{kind}">{svg}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("command", Command)
    app.add_directive("mermaid", Mermaid)
    app.add_directive("schedule", Timeline)
    return {"parallel_read_safe": True}
