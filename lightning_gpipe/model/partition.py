"""Which layers each stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Partition:
    """Which layers each stage runs.

    Args:
        sizes: Number of layers of each virtual stage, in order. Virtual stage v is a part of stage
            v modulo K.
        costs: Cost of each layer, in any unit.
        unit: What the costs are, for the table: "flops", "params", …
        virtual_stages: V, the number of virtual stages of each stage.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    unit: str
    virtual_stages: int = 1

    @property
    def count(self) -> int:
        """K, the number of stages."""
        return len(self.sizes) // self.virtual_stages

    @property
    def parts(self) -> tuple[range, ...]:
        """The layers of each virtual stage, as indices into the backbone."""
        ends = list(accumulate(self.sizes))
        return tuple(range(end - size, end) for size, end in zip(self.sizes, ends, strict=True))

    @property
    def stages(self) -> tuple[tuple[range, ...], ...]:
        """The layers of each stage, a range for each of its virtual stages."""
        return tuple(self.parts[stage :: self.count] for stage in range(self.count))

    def part_of(self, layer: int) -> int:
        """The virtual stage that runs a layer."""
        return next(part for part, layers in enumerate(self.parts) if layer in layers)

    def stage_of(self, layer: int) -> int:
        """The stage that runs a layer."""
        return self.part_of(layer) % self.count

    @property
    def part_shares(self) -> tuple[float, ...]:
        """Each virtual stage's share of the cost, 0 to 1."""
        total = sum(self.costs) or 1.0
        return tuple(sum(self.costs[i] for i in layers) / total for layers in self.parts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's share of the cost, 0 to 1."""
        return tuple(sum(self.part_shares[stage :: self.count]) for stage in range(self.count))
