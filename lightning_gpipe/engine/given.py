"""What losses are given beside the backbone's output, as far as their graphs keep it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROUNDING = 1e-5


def class_weights(node: Any) -> Tensor | None:
    """The weights of classes, or of positive ones, that a loss was given."""
    if node.name().startswith("NllLoss"):
        found: Tensor | None = node._saved_weight
        return found
    if node.name().startswith("BinaryCrossEntropyWithLogits"):
        found = node._saved_pos_weight
        return found if found is not None and found.ndim <= 1 else None
    return None


def is_normalised(node: Any, samples: int) -> bool:
    """Whether an operation takes a number per sample, of which the mean is 0 or 1, or the sum is 1.

    Args:
        node: The loss's.
        samples: How many there are.
    """
    if samples < 2 or not node.name().startswith(("Mul", "Div", "MseLoss", "L1Loss", "SmoothL1")):
        return False
    for name in "_saved_other", "_saved_self", "_saved_target":
        try:
            given = getattr(node, name, None)
        except RuntimeError:  # it was changed in place since, or isn't kept any more
            continue
        if isinstance(given, Tensor) and _is_per_sample(given, samples):
            total, size = float(given.sum(dtype=torch.float64)), float(given.abs().max())
            means = [abs(total), abs(total - samples), abs(total - 1)]
            if min(means) <= _ROUNDING * samples * size and not _are_few(given):
                return True
    return False


def _is_per_sample(given: Tensor, samples: int) -> bool:
    is_flat = given.shape == (samples,) or given.shape == (samples, 1)
    return is_flat and given.is_floating_point() and not given.requires_grad


def _are_few(given: Tensor) -> bool:
    """Whether there are two numbers at most, as for two classes, or whole ones."""
    given = given.detach()
    return len(given.unique()) <= 2 or bool((given == given.round()).all())
