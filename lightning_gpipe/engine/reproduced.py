"""Tells of layers that give other values in a recompute than in their forward.

What a recompute restores is known: weights, buffers, attributes, random numbers and more. Layers
may depend on something else, and then gradients would be those of another function, without a sign.
So in some calls the sum and the norm of a stage's outputs are compared.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.tensors.tree import Tree

#: How far kernels may round otherwise.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF = 1e-2


@dataclass(slots=True)
class Reproduced:
    """Compares outputs in the first calls that recompute, and now and then: see :func:`is_due`.

    Args:
        layers: The stage's, by their index.
    """

    layers: Sequence[int]
    _calls: int = 0
    _is_told: bool = False

    def begin(self) -> dict[int, list[Tensor]] | None:
        """Begin a call that recomputes; returns where its outputs are noted, if they are."""
        self._calls += 1
        return {} if not self._is_told and is_due(self._calls) else None

    def compare(self, noted: list[Tensor], output: Tree) -> None:
        """Warn, once, if an output isn't that of the forward.

        Args:
            noted: Its :func:`sums` then.
            output: The recompute's.
        """
        tensors = _floats(output)
        pairs = zip(noted, sums(output), tensors, strict=True)
        if self._is_told or all(_are_close(*pair) for pair in pairs):
            return
        self._is_told = True
        first, last = min(self.layers), max(self.layers)
        warnings.warn(
            f"In their recompute layers {first} to {last} of the backbone gave other values than in"
            " their forward, so gradients are those of another function. They use something that"
            " has changed in between, such as a global, an environment variable or a large tensor"
            " that the step sets for its call of the backbone. Hand it over with the input, or use"
            " GPipeStrategy(checkpoint='never').",
            stacklevel=2,
        )


def sums(output: Tree) -> list[Tensor]:
    """The sum and the norm of each floating-point tensor of an output."""
    dtype, norm = torch.float64, torch.linalg.vector_norm
    with torch.no_grad():
        found = [(t.sum(dtype=dtype), norm(t, dtype=dtype)) for t in _floats(output)]
        return [torch.stack(pair) for pair in found]


def rounding(dtype: torch.dtype) -> float:
    """How far what is computed twice may be off, as a part of its size."""
    return _ROUNDING.get(dtype, _HALF)


def _floats(output: Tree) -> list[Tensor]:
    return [t.detach() for t in output.tensors() if t.is_floating_point()]


def _are_close(before: Tensor, after: Tensor, tensor: Tensor) -> bool:
    total, norm = map(float, before)
    total_now, norm_now = map(float, after)
    allowed = rounding(tensor.dtype) * norm
    if not math.isfinite(norm):
        return True
    is_far = abs(total - total_now) > allowed * math.sqrt(tensor.numel())
    return not is_far and abs(norm - norm_now) <= allowed
