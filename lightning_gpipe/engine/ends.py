"""The two ends of the pipeline where the step runs once per micro-batch.

To the executor they look like links; see :mod:`lightning_gpipe.engine.executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.engine.executor import AtHand
from lightning_gpipe.model.program import ADD_RESIDUALS
from lightning_gpipe.tensors.tree import Tree


@dataclass(slots=True)
class MicroBatchInput(AtHand):
    """What goes into the first stage, and the gradients that come out."""

    _parts: dict[int, tuple[Tree, list[bool]]] = field(default_factory=dict)
    _wanted: dict[int, list[Tensor]] = field(default_factory=dict)
    _gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)

    def give(self, m: int, tree: Tree) -> None:
        """Give a micro-batch's input, with its graph."""
        flags = tree.wanting()
        self._parts[m] = tree.detached(), flags
        self._wanted[m] = [t for t, wants in zip(tree.leaves, flags, strict=True) if wants]

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """A micro-batch's input, once, and for each leaf whether it wants a gradient."""
        return self._parts.pop(m)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Take the gradient of a micro-batch's input."""
        self._gradients[m] = tree.leaves

    def wanted(self, m: int) -> list[Tensor]:
        """A micro-batch's input, as far as it wants gradients here."""
        return self._wanted.get(m, [])

    def roots(self, m: int) -> tuple[list[Tensor], list[Tensor]]:
        """Where the backward before the backbone begins, and with which gradients; once."""
        wanted = self._wanted.pop(m)
        gradients = self._gradients.pop(m, [None] * len(wanted))
        found = [(t, g) for t, g in zip(wanted, gradients, strict=True) if g is not None]
        return [t for t, _ in found], [g for _, g in found]


@dataclass(slots=True)
class MicroBatchOutput(AtHand):
    """What comes out of the last stage, and the gradients that go in."""

    _parts: dict[int, tuple[Tree, list[bool]]] = field(default_factory=dict)
    _wanted: dict[int, int] = field(default_factory=dict)
    _gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)

    def send(self, m: int, tree: Tree, requires_grad: Sequence[bool], training: bool) -> None:
        """Take a micro-batch's output, and for each leaf whether it wants a gradient."""
        self._parts[m] = tree, list(requires_grad)
        self._wanted[m] = sum(requires_grad)

    def output(self, m: int) -> tuple[Tree, list[bool]]:
        """A micro-batch's output, once."""
        return self._parts.pop(m)

    def catch(self, m: int) -> Callable[[Sequence[Tensor | None]], None]:
        """What takes the gradients of a micro-batch's output."""

        def take(gradients: Sequence[Tensor | None]) -> None:
            self._gradients[m] = gradients

        return take

    def take(self, m: int) -> tuple[Tree, list[bool]]:
        """The gradients of a micro-batch's output, once, of the leaves that want one."""
        count = self._wanted.pop(m)
        gradients = self._gradients.pop(m, [None] * count)
        return Tree.of_gradients(gradients), [False] * count


class OutputOutlines(dict[str, Tree]):
    """What comes out of the backbone for micro-batches that look alike: tensors on meta."""

    @staticmethod
    def of(made: tuple[Tree, Sequence[bool]]) -> Tree:
        """The outline of an output."""
        tree, flags = made
        leaves: list[Any] = []
        for leaf, wants in zip(tree.leaves, flags, strict=True):
            if isinstance(leaf, Tensor):
                leaves.append((leaf.shape, leaf.stride(), leaf.dtype, wants))
            else:
                leaves.append((leaf,))
        return Tree(leaves, tree.spec)

    def learn(self, name: str, outline: Tree) -> None:
        """Keep an outline that the last stage has told."""
        leaves: list[Any] = []
        for leaf in outline.leaves:
            if len(leaf) == 1:
                leaves.append(leaf[0])
            else:
                shape, stride, dtype, wants = leaf
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                leaves.append(meta.requires_grad_(wants))
        self[name] = outline.with_leaves(leaves)

    def check(self, name: str, made: tuple[Tree, Sequence[bool]]) -> None:
        """Check that an output looks like the one of which the outline was taken.

        Raises:
            RuntimeError: If it doesn't.
        """
        tree, known = made[0], self[name]
        if tree.spec != known.spec:
            raise RuntimeError(
                "The backbone's output is built otherwise than before, so other stages can't know"
                f" it: a loop that skips blocks, such as by LayerDrop, may do so.{ADD_RESIDUALS}"
            )
        is_alike = True
        for now, before in zip(tree.leaves, known.leaves, strict=True):
            if isinstance(now, Tensor) and isinstance(before, Tensor):
                is_alike &= (now.shape, now.dtype) == (before.shape, before.dtype)
            elif isinstance(now, Tensor) or isinstance(before, Tensor):
                is_alike = False
            elif now != before:
                raise RuntimeError(
                    f"The backbone's output holds {now!r}, where it held {before!r} before. Other"
                    " stages know what isn't in a tensor only if it stays the same: give it as a"
                    " tensor of shape [batch, ...], and reduce it in the step."
                )
        if not is_alike:
            raise RuntimeError(
                "The backbone's output has another shape or type than before for a batch of the"
                " same shapes, so other stages can't know it. Where a layer pads to what a"
                " micro-batch needs, pad to one length before the backbone (pad_packed_sequence has"
                " total_length). Where lengths or sizes grow in the course of training, crop the"
                " batch in on_after_batch_transfer, not in the step. Else use"
                " GPipeStrategy(step='mini-batch')."
            )
