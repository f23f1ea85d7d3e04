"""How much the loss of each micro-batch counts in that of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Weighting:
    """The weights of a mini-batch's losses: numbers of samples, or what the step returns.

    Weights that the step returns are known one after another, and their sum at the end. Until then
    the first one stands for all, so that gradients have the right magnitude; :attr:`factor` makes
    them exact.

    Args:
        sizes: Samples in each micro-batch.
        scale: What all losses are multiplied by.
    """

    def __init__(self, sizes: Sequence[int], scale: float = 1.0) -> None:
        self._sizes, self._scale = list(sizes), scale
        self._given: list[float | None] = [None] * len(sizes)
        self._reference = 0.0

    @property
    def is_given(self) -> bool:
        """Whether the step returns weights."""
        return any(weight is not None for weight in self._given)

    @property
    def weights(self) -> list[float]:
        """The weight of every micro-batch, once all are known."""
        return [
            float(size) if given is None else given
            for size, given in zip(self._sizes, self._given, strict=True)
        ]

    def give(self, m: int, weight: Any) -> None:
        """Take the weight that the step returned for a micro-batch.

        Raises:
            ValueError: If it is negative or not finite.
        """
        value = float(weight)
        if not 0 <= value < float("inf"):
            raise ValueError(
                f"The step returned the weight {value} for micro-batch {m}: a weight is a number"
                " from 0, such as how many tokens the loss is the mean of."
            )
        self._given[m] = value
        self._reference = self._reference or value

    def take_over(self, weights: Sequence[float]) -> None:
        """Take the weights of a stage that knows all of them."""
        self._given = list(weights)
        self._reference = next((w for w in weights if w), 0.0)

    def seed(self, m: int) -> float:
        """What a micro-batch's loss is multiplied by."""
        if self._given[m] is None:
            return self._scale * self._sizes[m] / sum(self._sizes)
        return self._scale * self.weights[m] / (self._reference or 1.0) / len(self._sizes)

    @property
    def factor(self) -> float:
        """What gradients are multiplied by at the end."""
        total = sum(self.weights)
        if not self.is_given or not total:
            return 1.0
        return self._reference * len(self._sizes) / total
