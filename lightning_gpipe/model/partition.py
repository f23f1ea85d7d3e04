"""Which layers each stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Partition:
    """Which layers each stage runs.

    Args:
        sizes: Number of layers of each stage, in order.
        costs: Cost of each layer, in any unit.
        unit: What the costs are, for the table: "flops", "params", …
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    unit: str

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage, as indices into the backbone."""
        ends = list(accumulate(self.sizes))
        return tuple(range(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    def stage_of(self, layer: int) -> int:
        """The stage that runs a layer."""
        return next(k for k, layers in enumerate(self.stages) if layer in layers)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's share of the cost, 0 to 1."""
        total = sum(self.costs) or 1.0
        return tuple(sum(self.costs[i] for i in layers) / total for layers in self.stages)
