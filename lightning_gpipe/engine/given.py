"""What losses are given beside the backbone's output, as far as their graphs keep it."""

from __future__ import annotations

from collections.abc import Collection
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

    The sum of two numbers says nothing: as labels that were smoothed may be 0.1 and 0.9.

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
            means = [abs(total), abs(total - samples), *([abs(total - 1)] if samples > 2 else [])]
            if min(means) <= _ROUNDING * samples * size and not _are_few(given, samples):
                return True
    return False


def divisors_of(nodes: Collection[Any]) -> list[float]:
    """The tensors of one number by which samples are divided, in the order of operations.

    Numbers of Python, whole ones, and what sums are divided by, such as counts, aren't among them.

    Args:
        nodes: The loss's.
    """
    found = []
    for node in sorted(nodes, key=lambda node: int(node._sequence_nr())):
        divided = node.next_functions[0][0] if node.name().startswith("DivBackward") else None
        if divided is None or divided.name().startswith("SumBackward"):
            continue
        try:
            given = getattr(node, "_saved_other", None)
        except RuntimeError:  # it was changed in place since, or isn't kept any more
            continue
        made = node._input_metadata[0]
        if isinstance(given, Tensor) and given.ndim == 0 and made.shape:
            is_tensor = given.dtype == made.dtype  # Python's numbers are of 64 bits
            if is_tensor and not given.requires_grad and not float(given).is_integer():
                found.append(float(given))
    return found


def _is_per_sample(given: Tensor, samples: int) -> bool:
    is_flat = given.shape == (samples,) or given.shape == (samples, 1)
    return is_flat and given.is_floating_point() and not given.requires_grad


def _are_few(given: Tensor, samples: int) -> bool:
    """Whether more samples have two numbers at most, as for two classes, or all are whole ones."""
    given = given.detach()
    return len(given.unique()) <= min(2, samples - 1) or bool((given == given.round()).all())
