"""Memory against O(N + L/K · N/M), and against O(N · L) without pipelining and recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.paper.models import Transformer, plans
from examples.paper.tables import Table

SIZES = {"length": 256, "width": 512, "hidden": 2048, "heads": 8, "vocabulary": 512}
STAGES = 2, 4, 8
CHUNKS = 2, 4, 8, 16, 32
TEXTS = 32, 64
DEPTHS = 24, 48
MB = 1e6


@dataclass(frozen=True)
class Point:
    """What the fullest stage holds of micro-batches.

    Args:
        layers: L.
        texts: N.
        stages: K.
        chunks: M.
        held: Bytes.
    """

    layers: int
    texts: int
    stages: int
    chunks: int
    held: int

    @property
    def terms(self) -> tuple[float, float]:
        """N, and L/K · N/M."""
        return self.texts, self.layers / self.stages * self.texts / self.chunks


def sweep(
    depths: Sequence[int] = DEPTHS,
    texts: Sequence[int] = TEXTS,
    stages: Sequence[int] = STAGES,
    chunks: Sequence[int] = CHUNKS,
) -> list[Point]:
    """Plan all combinations."""
    found = []
    for depth in depths:
        for n in texts:
            model = Transformer(depth, texts=n, **SIZES)
            for m in chunks:
                for k, plan in plans(model, stages, m).items():
                    held = max(stage.memory.of_micro_batches for stage in plan.stages)
                    found.append(Point(depth, n, k, m, held))
    return found


def fitted(points: Sequence[Point]) -> tuple[float, float]:
    """The factors of N and of L/K · N/M that leave the least relative error, in bytes."""
    held = torch.tensor([[float(point.held)] for point in points], dtype=torch.float64)
    terms = torch.tensor([point.terms for point in points], dtype=torch.float64)
    one, other = torch.linalg.lstsq(terms / held, torch.ones_like(held)).solution.flatten()
    return float(one), float(other)


def expected(point: Point, factors: tuple[float, float]) -> float:
    """Bytes by the formula."""
    return sum(factor * term for factor, term in zip(factors, point.terms, strict=True))


def errors(points: Sequence[Point]) -> Table:
    """How far the formula is off, over L and N, in per cent of what is planned."""
    factors = fitted(points)
    rows = []
    for k in sorted({point.stages for point in points}):
        row: list[object] = [k]
        for m in sorted({point.chunks for point in points}):
            here = [p for p in points if (p.stages, p.chunks) == (k, m)]
            off = [expected(p, factors) / p.held - 1 for p in here]
            least, most = (min(p.held for p in here) / MB, max(p.held for p in here) / MB)
            row.append(f"{least:,.0f} to {most:,.0f} MB ({min(off):+.0%} to {max(off):+.0%})")
        rows.append(row)
    return Table(["K", *(f"M={m}" for m in sorted({p.chunks for p in points}))], rows)


def naive(depths: Sequence[int] = DEPTHS, texts: Sequence[int] = TEXTS) -> Table:
    """Without pipelining and recompute: bytes for each text and layer."""
    rows = []
    for depth in depths:
        for n in texts:
            (plan,) = plans(Transformer(depth, texts=n, **SIZES), [1], 1, "never").values()
            held = plan.stages[0].memory.of_micro_batches
            rows.append([depth, n, f"{held / MB:,.0f}", f"{held / MB / (n * depth):.2f}"])
    return Table(["L", "N", "held, MB", "of each text and layer, MB"], rows)
