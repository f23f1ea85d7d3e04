"""Places nodes, arrows and messages of diagrams."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from html import escape

_TIP = (
    'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path'
    ' class="tip" d="M0 0 8 4 0 8z"/></marker>'
)
_ROW, _GAP, _HIGH = 74, 26, 30
_LETTER = 8.0


def graph(lines: Sequence[str]) -> str:
    """Arrows ``a --> b`` as layers, every arrow from a higher one to a lower one."""
    arrows = [tuple(line.split(" --> ")) for line in lines]
    names = dict.fromkeys(name for arrow in arrows for name in arrow)
    above = {n: [a for a, b in arrows if b == n] for n in names}

    def depth(name: str) -> int:
        return 1 + max(map(depth, above[name]), default=-1)

    # An arrow over several rows has a bend in each of them, which takes a place there.
    rows: list[list[str]] = [[] for _ in range(1 + max(map(depth, names)))]
    for name in names:
        rows[depth(name)].append(name)
    chains = []
    for a, b in arrows:
        bends = [f"{a}>{b}>{row}" for row in range(depth(a) + 1, depth(b))]
        for row, bend in enumerate(bends, depth(a) + 1):
            rows[row].append(bend)
        chains.append([a, *bends, b])
    links = [pair for chain in chains for pair in itertools.pairwise(chain)]
    for turn in range(8):  # neighbours above and below by turns pull a node to their middle
        order = range(1, len(rows)) if turn % 2 == 0 else range(len(rows) - 2, -1, -1)
        for row in order:
            near = rows[row - 1 if turn % 2 == 0 else row + 1]
            place = {name: i / max(len(near) - 1, 1) for i, name in enumerate(near)}

            def middle(name: str, place: dict[str, float] = place) -> float:
                ends = [x for pair in links if name in pair for x in pair if x in place]
                return sum(place[x] for x in ends) / len(ends) if ends else 0.5

            rows[row].sort(key=middle)
    wide = {n: 0.0 if ">" in n else _LETTER * len(n) + 22 for row in rows for n in row}
    totals = [sum(wide[n] for n in row) + _GAP * (len(row) - 1) for row in rows]
    width, at = max(totals) + 4, {}
    for i, row in enumerate(rows):
        x = (width - totals[i]) / 2
        for name in row:
            at[name] = x + wide[name] / 2, 4 + _ROW * i
            x += wide[name] + _GAP
    parts = []
    for chain in chains:
        x, y = at[chain[0]]
        path = f"M{x:.0f} {y + _HIGH:.0f}"
        y += _HIGH
        for name in chain[1:]:
            to_x, to_y = at[name]
            half = (to_y - y) / 2
            path += f" C{x:.0f} {y + half:.0f} {to_x:.0f} {to_y - half:.0f} {to_x:.0f} {to_y:.0f}"
            x, y = to_x, to_y
            if ">" in name:
                y += _HIGH
                path += f" V{y:.0f}"
        parts.append(f'<path class="line" d="{path}" marker-end="url(#tip)"/>')
    for name in names:
        x, y = at[name]
        parts.append(
            f'<rect class="box" x="{x - wide[name] / 2:.0f}" y="{y:.0f}" width="{wide[name]:.0f}"'
            f' height="{_HIGH}" rx="5"/><text class="code" x="{x:.0f}" y="{y + 20:.0f}"'
            f' font-size="13" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg(width, _ROW * (len(rows) - 1) + _HIGH + 8, parts)


def sequence(lines: Sequence[str]) -> str:
    """Participants as columns, messages between them and notes over them as rows."""
    names: dict[str, str] = {}
    parts: list[str] = []
    y, step, column = 62, 34, 165
    rows: list[str] = []

    def x_of(name: str) -> int:
        return 80 + column * list(names).index(name)

    for line in lines:
        if found := re.fullmatch(r"participant (\w+) as (.+)", line):
            names[found[1]] = found[2]
        elif found := re.fullmatch(r"Note over (\w+)(?:,(\w+))?: (.+)", line):
            ends = [x_of(name) for name in (found[1], found[2] or found[1])]
            half = max(72, 4 * len(found[3])) if ends[0] == ends[1] else 74
            left, right = min(ends) - half, max(ends) + half
            rows.append(
                f'<rect class="note" x="{left}" y="{y - 15}" width="{right - left}" height="24"'
                f' rx="3"/><text x="{(left + right) / 2}" y="{y + 2}" font-size="12"'
                f' text-anchor="middle">{escape(found[3])}</text>'
            )
            y += step
        elif found := re.fullmatch(r"(\w+)(--?)>>(\w+): (.+)", line):
            start, end = x_of(found[1]), x_of(found[3])
            toward = 4 if end > start else -4
            dash = ' stroke-dasharray="4 3"' if found[2] == "--" else ""
            rows.append(
                f'<path class="line" d="M{start} {y}H{end - toward}"{dash} marker-end="url(#tip)"/>'
                f'<text x="{(start + end) / 2}" y="{y - 5}" font-size="12"'
                f' text-anchor="middle">{escape(found[4])}</text>'
            )
            y += step
        else:
            raise ValueError(f"A line of a sequence diagram that isn't drawn: {line!r}")
    for name, text in names.items():
        x = x_of(name)
        parts.append(
            f'<path class="line" d="M{x} 32V{y - 10}" stroke-opacity="0.4"/>'
            f'<rect class="box" x="{x - 72}" y="4" width="144" height="28" rx="5"/>'
            f'<text x="{x}" y="23" font-size="13" text-anchor="middle">{escape(text)}</text>'
        )
    return _svg(160 + column * (len(names) - 1), y, [*parts, *rows])


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    body = "".join(parts)
    tip = f"tip-{zlib.crc32(body.encode()):x}"  # a page may have several drawings
    body = body.replace("#tip", f"#{tip}")
    return f'<svg {size}><defs><marker id="{tip}" {_TIP}</defs>{body}</svg>'
