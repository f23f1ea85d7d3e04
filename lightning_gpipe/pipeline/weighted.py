"""Gradients of losses whose weights are known only at the end of the mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_gpipe.engine.weighting import Weighting


class WeightedGradients:
    """Multiplies a mini-batch's gradients at its end, and not what has accumulated before.

    Args:
        module: The user's module.
        aside: Gradients that are kept apart from the parameters.
        is_weighted: Whether a mini-batch before had such weights: then this one may.
    """

    def __init__(
        self, module: nn.Module, aside: dict[nn.Parameter, Tensor], is_weighted: bool
    ) -> None:
        self._parameters = [p for p in module.parameters() if not p.is_meta]
        self._aside = aside
        self._before: dict[nn.Parameter, Tensor] = {}
        self._aside_before: dict[nn.Parameter, Tensor] = {}
        self._is_mixed = not is_weighted and any(p.grad is not None for p in self._parameters)
        if is_weighted:
            self._aside_before = dict(aside)
            aside.clear()
            for p in self._parameters:
                if p.grad is not None:
                    self._before[p], p.grad = p.grad, None

    @torch.no_grad()
    def finish(self, weighting: Weighting) -> None:
        """Multiply the gradients by what the weights say.

        Args:
            weighting: The weights of the mini-batch.

        Raises:
            RuntimeError: If what has accumulated before had none.
        """
        if self._is_mixed and weighting.is_given:
            raise RuntimeError(
                "The step returned a weight, and in this accumulation of gradients it has returned"
                " none before: return one from the first step on, such as the number of samples."
            )
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        gradients += self._aside.values()
        if gradients and weighting.factor != 1.0:
            torch._foreach_mul_(gradients, weighting.factor)
        for p, before in self._before.items():
            p.grad = before if p.grad is None else before.add_(p.grad)
        for p, before in self._aside_before.items():
            new = self._aside.get(p)
            self._aside[p] = before if new is None else before.add_(new)
