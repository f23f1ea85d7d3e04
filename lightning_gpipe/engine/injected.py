"""Gradients that layers give in their backward, whatever the loss: some auxiliary losses are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_gpipe.engine.split import runs_once
from lightning_gpipe.tensors.graph import nodes_of


class InjectedGradients:
    """Looks for them in a stage's first backward.

    Such a gradient is one of each micro-batch, so it comes M times as large.
    """

    def __init__(self) -> None:
        self._is_through = False

    def look(
        self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None], count: int
    ) -> None:
        """Warn if parameters have gradients where the output has none. Adds to no gradient.

        Args:
            roots: Where the backward of each output that wants a gradient begins.
            gradients: Their gradients.
            count: M.
        """
        if self._is_through or count == 1:
            return
        self._is_through = True
        begun = [(root, g) for root, g in zip(roots, gradients, strict=True) if g is not None]
        nodes = list(nodes_of(root.node for root, _ in begun))
        kinds = [kind for node in nodes if (kind := _kind_of(node)) is not None]
        leaves = [node.variable for node in nodes if hasattr(node, "variable")]
        leaves = [leaf for leaf in leaves if leaf.numel()]  # not where the graph begins
        if not kinds or not leaves or runs_once([root.node for root, _ in begun]):
            return
        found = torch.autograd.grad(
            [root for root, _ in begun],
            leaves,
            [torch.zeros_like(gradient) for _, gradient in begun],
            retain_graph=True,
            allow_unused=True,
        )
        if any(g is not None and bool(g.nan_to_num(0.0).any()) for g in found):
            warnings.warn(
                f"Layers give gradients in their backward where the loss gives none, as"
                f" {' or '.join(dict.fromkeys(kinds))} may do for an auxiliary loss. With {count}"
                f" micro-batches this comes {count} times, and the sum is {count} times as large:"
                " divide it by the number of micro-batches, or return the auxiliary loss per sample"
                " with the layer's output.",
                stacklevel=2,
            )


def _kind_of(node: Node) -> str | None:
    """The name of a function that was written in Python, by the user."""
    kind = getattr(node, "_forward_cls", None)
    room = str(getattr(kind, "__module__", "")).partition(".")[0]
    return None if kind is None or room in ("torch", "lightning_gpipe") else str(kind.__name__)
