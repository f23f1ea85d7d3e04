"""Tells once that much of a step's memory is outside the backbone, on every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_gpipe.engine.whole_batch import WholeBatch
from lightning_gpipe.plan.report import OUTSIDE_LIMIT
from lightning_gpipe.state.placement import Placement
from lightning_gpipe.tensors.graph import nodes_of

#: Operations whose result has no memory of its own, by the beginning of their nodes' names.
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "TBackward", "Expand"),
    *("Unsqueeze", "Squeeze", "Select", "Slice", "Split", "Unbind", "Chunk", "Alias", "AsStrided"),
)
#: Copies of a trained parameter: itself, its gradient, and two of Adam's.
_COPIES = 4
#: Bytes outside the backbone below which nothing is told.
_WORTH_A_WORD = 2**25


@dataclass(slots=True)
class OutsideMemory:
    """Estimates a stage's memory in the first step, by the sizes of what operations return.

    Args:
        engine: Runs the backbone.
        placement: What this rank holds.
        warn: Warns on rank 0.
        is_told: Whether nothing is left to tell.
    """

    engine: WholeBatch
    placement: Placement
    warn: Callable[[str], object]
    is_told: bool

    def tell(self, loss: Tensor) -> None:
        """Warn before the first backward, if the mode is wrong for the model.

        Args:
            loss: What the step returned.
        """
        if self.is_told or loss.grad_fn is None:
            return
        self.is_told = True
        kept = self.engine.kept_graphs
        if not kept:  # what a micro-batch takes isn't known before its recompute
            return
        inside = _bytes(kept)
        outside = _bytes([loss.grad_fn])
        for slot in (*self.placement.own, *self.placement.replicated):
            size = slot.tensor.numel() * slot.tensor.element_size()
            size *= _COPIES if slot.tensor.requires_grad else 1
            if slot.is_outside and not slot.parts:
                outside += size
            else:
                inside += size
        share = outside / max(inside + outside, 1)
        if outside > _WORTH_A_WORD and share > OUTSIDE_LIMIT:
            self.warn(
                f"About {share:.0%} of the memory that a step takes on the first stage is outside"
                " the backbone: what the step computes before and behind it, of the whole"
                " mini-batch, on every stage. With GPipeStrategy(step='micro-batch') it is on one"
                " stage, for one micro-batch at a time, if the loss is a mean over samples or"
                " tokens."
            )


def _bytes(nodes: Iterable[Any]) -> int:
    """Bytes of what the operations of a graph return, views aside."""
    total = 0
    for node in nodes_of(nodes):
        name = node.name()
        if not name.startswith(_VIEWS) and "AccumulateGrad" not in name:
            for kind in getattr(node, "_input_metadata", ()):
                with suppress(RuntimeError):  # a nested tensor has no shape
                    total += math.prod(kind.shape) * kind.dtype.itemsize
    return total
