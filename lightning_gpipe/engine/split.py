"""Splits a backward: the gradient of the input first, those of the weights at any time later.

The stage before waits for the first alone, so the second can fill a gap. In the graph of a
micro-batch some nodes lead to its input. The first half runs those, without what they compute for
weights, and keeps the gradients that arrive at each of them from which a weight is reached. The
second half runs these nodes once more, each for its weights alone. (Zero bubble, Qi et al. 2023.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_gpipe.tensors.graph import next_of, nodes_of


@dataclass(slots=True)
class _Branch:
    """A node from which weights are reached that the input's gradient doesn't need.

    Args:
        node: The node.
        leaves: The nodes that accumulate the weights' gradients.
        arrived: The gradients that the node was given in the first half.
    """

    node: Node
    leaves: list[Any]
    arrived: tuple[Tensor | None, ...] = ()


@dataclass(slots=True)
class SplitBackward:
    """The backward of a micro-batch in two halves.

    Args:
        branches: Where weights are reached.
    """

    branches: list[_Branch]

    @classmethod
    def of(cls, roots: Iterable[Node], entry: Node) -> SplitBackward | None:
        """Look for the weights in a graph.

        Args:
            roots: Where the backward begins.
            entry: The node that catches the input's gradient.

        Returns:
            None if it doesn't pay: where a weight is used twice, both uses would have to be added;
            a node that is written in Python computes all that it computes at once; and an output
            may not depend on the input.
        """
        graph = _Graph(list(roots), entry)
        if not graph.all_on_the_way:
            return None
        branches, seen = [], set[Any]()
        for node in graph.on_the_way:
            leaves = graph.weights_beside(node)
            if leaves:
                if isinstance(node, BackwardCFunction) or not seen.isdisjoint(leaves):
                    return None
                seen.update(leaves)
                branches.append(_Branch(node, leaves))
        return cls(branches)

    def first(
        self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor], start: Tensor
    ) -> None:
        """Compute the gradient of the input.

        Args:
            roots: Where the backward begins.
            gradients: Their gradients.
            start: The leaf before the entry, which gets the gradient.
        """
        handles = [
            branch.node.register_prehook(partial(setattr, branch, "arrived"))
            for branch in self.branches
        ]
        try:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=start)
        finally:
            for handle in handles:
                handle.remove()

    def second(self) -> None:
        """Compute the gradients of the weights, adding to those that there are."""
        while self.branches:
            branch = self.branches.pop()
            pairs = [(i, g) for i, g in enumerate(branch.arrived) if g is not None]
            if pairs:
                torch.autograd.backward(
                    [GradientEdge(branch.node, i) for i, _ in pairs],
                    [g for _, g in pairs],
                    inputs=[leaf.variable for leaf in branch.leaves],
                )


#: Nodes that run once, for all inputs: that of ``checkpoint(..., use_reentrant=True)`` calls a
#: backward of its own; a compiled graph gives memory away that its forward has saved.
_RUN_ONCE = {"CheckpointFunctionBackward", "CompiledFunctionBackward"}


def runs_once(roots: Sequence[Node]) -> bool:
    """Whether a graph has a node that can't run for some of its inputs, and later for others."""
    return any(type(node).__name__ in _RUN_ONCE for node in nodes_of(roots))


class _Graph:
    """What a graph's nodes lead to.

    Args:
        roots: Where the backward begins.
        entry: The node that catches the input's gradient.
    """

    def __init__(self, roots: Sequence[Node], entry: Node) -> None:
        self._next: dict[Node, list[Node]] = {}
        self.on_the_way: list[Node] = []  # to the input, from there on
        self._is_on_the_way = {entry}
        for root in roots:
            self._walk(root)
        self.all_on_the_way = self._is_on_the_way.issuperset(roots)

    def weights_beside(self, node: Node) -> list[Any]:
        """The leaves that are reached from a node, and not on the way to the input."""
        beside = dict.fromkeys(n for n in self._next[node] if n not in self._is_on_the_way)
        return [n for n in nodes_of(beside, self._next.__getitem__) if hasattr(n, "variable")]

    def _walk(self, root: Node) -> None:
        """Visit every node after those that it leads to."""
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                if any(n in self._is_on_the_way for n in self._next[node]):
                    self._is_on_the_way.add(node)
                    self.on_the_way.append(node)
            elif node not in self._next and node not in self._is_on_the_way:
                self._next[node] = next_of(node)
                stack.append((node, True))
                stack += [(n, False) for n in self._next[node]]
