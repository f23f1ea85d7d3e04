"""The two ends of a mini-batch that goes through the pipeline at once.

At the first stage it is split, and its gradient put together; at the last one the output is put
together, and its gradient split. To the executor they look like links; see
:mod:`lightning_gpipe.engine.executor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_gpipe.engine.executor import AtHand
from lightning_gpipe.tensors.microbatch import GetOutline, Merge, Split, unknown
from lightning_gpipe.tensors.tree import Tree


class BatchInput(AtHand):
    """The input of a mini-batch.

    Args:
        batch: The backbone's input, tensors ``[batch, …]``.
        split: How it is split.
        is_here: Whether this rank runs the first stage; else nothing is kept.
    """

    def __init__(self, batch: Tree, split: Split, is_here: bool) -> None:
        self._split = split
        self._flags = batch.wanting()
        leaves = zip(batch.leaves, split.split_leaves, self._flags, strict=True)
        wanted = [(t.detach(), is_split) for t, is_split, wants in leaves if wants and is_here]
        self._wanted = [leaf for leaf, _ in wanted]
        self._is_split = [is_split for _, is_split in wanted]
        self._parts = dict(enumerate(split.scatter(batch.detached()))) if is_here else {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """A micro-batch's input, once, and for each leaf whether it wants a gradient."""
        return self._parts.pop(m), list(self._flags)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Take the gradient of a micro-batch's input."""
        self._gradients[m] = tree.leaves

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each leaf that wants one, once all micro-batches' are there."""
        nothing: list[Tensor | None] = [None] * len(self._wanted)
        rows = [self._gradients.get(m, nothing) for m in range(len(self._split.sizes))]
        self._gradients.clear()
        return self._split.gather_gradients(self._wanted, self._is_split, rows)


@dataclass(slots=True)
class BatchOutput(AtHand):
    """The output of a mini-batch.

    Args:
        split: How the input was split.
    """

    split: Split
    _parts: list[tuple[Tree, list[bool]]] = field(default_factory=list)
    _flags: list[list[bool]] = field(default_factory=list)
    _merge: Merge | None = None
    _rows: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Take a micro-batch's output, and for each leaf whether it wants a gradient."""
        self._parts.append((tree, list(requires_grad)))

    def merge(self, batch: Tree, outline: GetOutline = unknown) -> tuple[Tree, list[int]]:
        """Put the output together, once all micro-batches' are there.

        Args:
            batch: The backbone's input.
            outline: See :meth:`Merge.merge`.

        Returns:
            The output, and which of its leaves want a gradient.
        """
        outputs, self._flags = [tree for tree, _ in self._parts], [f for _, f in self._parts]
        self._parts = []
        merged, self._merge = Merge.merge(outputs, self.split, batch, outline)
        wanted = [i for i in range(len(merged.leaves)) if any(row[i] for row in self._flags)]
        return merged, wanted

    def set_gradients(self, wanted: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Give the gradients of the output.

        Args:
            wanted: Which leaves want one.
            gradients: Theirs.
        """
        if self._merge is None:
            raise RuntimeError("The output's gradients came before the output.")
        leaves: list[Tensor | None] = [None] * len(self._merge.lengths)
        for i, gradient in zip(wanted, gradients, strict=True):
            leaves[i] = gradient
        rows = self._merge.scatter_gradients(leaves, len(self.split.sizes))
        self._rows = dict(enumerate(rows))

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """The gradients of a micro-batch's output, once, of the leaves that want one."""
        row, flags = self._rows.pop(m), self._flags[m]
        wanted = [gradient for gradient, wants in zip(row, flags, strict=True) if wants]
        return Tree.of_gradients(wanted), [False] * len(wanted)
