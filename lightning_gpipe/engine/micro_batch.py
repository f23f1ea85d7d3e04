"""One micro-batch in a stage, between its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_gpipe.engine.autograd import run_backward
from lightning_gpipe.engine.split import SplitBackward, runs_once
from lightning_gpipe.tensors import hooks, strides
from lightning_gpipe.tensors.tree import Tree

Gradients: TypeAlias = Sequence[Tensor | None]
#: Takes the gradient of each input leaf that wants one, with the strides that autograd gave it.
HandOn: TypeAlias = Callable[[Gradients], None]


@dataclass(slots=True)
class _Catch:
    """Where the gradient of a micro-batch's input goes when it arises."""

    take: Callable[[Gradients], None] | None = None
    has_taken: bool = False


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on a stage, between its forward and its backward.

    Args:
        input_requires_grad: For each input leaf whether it wants a gradient.
        is_own: Whether nobody else uses the input's memory: where it isn't needed again, layers
            get it as it is.
        is_lent: Whether layers get those of its leaves as they are that want no gradient, though
            the user has them, too.
        output_requires_grad: The same for the output.
        stored: The input, kept for a recompute.
        roots: Where the backward of each output leaf that wants a gradient begins.
        catch: Where the input's gradient goes; None: there is no graph.
    """

    input_requires_grad: list[bool]
    is_own: bool = False
    is_lent: bool = False
    output_requires_grad: list[bool] = field(default_factory=list)
    stored: Tree | None = None
    _versions: list[int] = field(default_factory=list)
    roots: list[GradientEdge] | None = None
    catch: _Catch | None = None
    _entry: Node | None = None
    _rest: Callable[[], None] | None = None
    _hooks: int = 0  # before the layers ran
    _has_hooks: bool = False

    @property
    def needs_backward(self) -> bool:
        """Whether anything on this stage or before it wants a gradient."""
        return any(self.output_requires_grad)

    def lent(self, inputs: Tree) -> Tree:
        """The input as the layers get it where there are no gradients."""
        return inputs.with_leaves(self._given(inputs, keep_input=False))

    def enter(self, inputs: Tree, keep_input: bool = False) -> Tree:
        """The input as the layers get it, with a graph where a gradient is wanted.

        Args:
            inputs: The input.
            keep_input: Whether it is needed after that, too.
        """
        self._hooks = hooks.count()
        leaves = self._given(inputs, keep_input)
        wanted = [i for i, wants in enumerate(self.input_requires_grad) if wants]
        if wanted:
            self.catch = _Catch()
            start = _start(leaves[wanted[0]].device)
            heads = _Entry.apply(start, self.catch, [leaves[i] for i in wanted])
            self._entry = heads[0].grad_fn
            for i, head in zip(wanted, heads, strict=True):
                leaves[i] = head
        return inputs.with_leaves(leaves)

    def _given(self, inputs: Tree, keep_input: bool) -> list[Any]:
        """What layers get of the input's leaves."""
        if self.is_own and not keep_input:
            return list(map(_unchanged, inputs.leaves))
        if not self.is_lent:
            return list(map(_copied, inputs.leaves))
        pairs = zip(inputs.leaves, self.input_requires_grad, strict=True)
        return [_copied(leaf) if wants else _detached(leaf) for leaf, wants in pairs]

    def enter_for_now(self, inputs: Tree) -> Tree:
        """The same, with a graph that catches nothing: there will be another for the backward."""
        flags = self.input_requires_grad
        leaves = [
            strides.copy(t.detach().requires_grad_()) if wants else _copied(t)
            for t, wants in zip(inputs.leaves, flags, strict=True)
        ]
        if any(wants and not leaf.requires_grad for leaf, wants in zip(leaves, flags, strict=True)):
            return self.enter(inputs, True)  # of strides that autograd's operations don't keep
        return inputs.with_leaves(leaves)

    def end_forward(self, inputs: Tree, outputs: Tree, keeps_graph: bool) -> None:
        """Keep what the backward needs: the graph, or else the input.

        Args:
            inputs: What the stage was given.
            outputs: What came out, with its graph.
            keeps_graph: Whether the graph has its activations.
        """
        self.output_requires_grad = outputs.wanting()
        if self.needs_backward and keeps_graph:
            self.roots, self._has_hooks = _roots(outputs), hooks.count() != self._hooks
        elif self.needs_backward:
            self.stored, self._versions = inputs, inputs.versions()

    def enter_again(self, keep_input: bool) -> Tree:
        """The input as the layers get it in a recompute.

        Args:
            keep_input: Whether it is needed after that, too.

        Raises:
            RuntimeError: If it has changed.
        """
        if self.stored is None or self._versions != self.stored.versions():
            raise RuntimeError(
                "The backbone's input was changed in place between its forward and its backward, so"
                " the recomputed activations would be wrong. Change a clone of it."
            )
        inputs = self.enter(self.stored, keep_input)
        if not keep_input:
            self.stored = None
        return inputs

    def end_recompute(self, outputs: Tree) -> None:
        """Keep the graph."""
        self.roots, self._has_hooks = _roots(outputs), hooks.count() != self._hooks

    def backward(
        self, gradients: Gradients, retain: bool, hand_on: HandOn, also: Tensor | None
    ) -> None:
        """See :meth:`lightning_gpipe.engine.stage.Stage.backward`."""
        keeps = retain and self.stored is None
        edges, given = self._begin_backward(gradients, keeps, hand_on)
        if also is not None:
            edges, given = [*edges, get_gradient_edge(also)], [*given, torch.ones_like(also)]
        if edges:
            run_backward(edges, given, keeps)
        self._end_backward(hand_on)

    def backward_input(
        self, gradients: Gradients, hand_on: HandOn, weights: Sequence[nn.Parameter]
    ) -> bool:
        """Compute the input's gradient alone.

        Args:
            gradients: The gradient of each output leaf that wants one.
            hand_on: Takes the input's.
            weights: Those that :meth:`backward_weights` gives a gradient.

        Returns:
            False if the graph can't be split: where layers put hooks on tensors, call a backward in
            theirs, or are compiled, all is computed at once; else the rest takes as long as a whole
            backward.
        """
        edges, given = self._begin_backward(gradients, False, hand_on)
        entry, self._entry = self._entry, None
        split = None
        if self._has_hooks or runs_once([e.node for e in edges]):
            if edges:
                run_backward(edges, given)
            self._end_backward(hand_on)
            return False
        if edges and entry is not None:
            split, start = SplitBackward.of([e.node for e in edges], entry), _start_of(entry)
            if split is not None:
                split.first(edges, given, start)
            else:
                torch.autograd.backward(edges, given, retain_graph=True, inputs=start)
        rest = partial(_backward_to, weights, edges, given)
        self._rest = rest if split is None else split.second
        self._end_backward(hand_on)
        return split is not None or not edges or entry is None

    def backward_weights(self) -> None:
        """Compute the gradients that :meth:`backward_input` has left, adding to those there are."""
        if self._rest is not None:
            self._rest()

    def _begin_backward(
        self, gradients: Gradients, keeps: bool, hand_on: HandOn
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where a backward begins, with which gradients; the graph is let go of unless kept.

        The input's gradient is handed on as soon as it arises.
        """
        if self.catch is not None:
            self.catch.take, self.catch.has_taken = hand_on, False
        pairs = zip(self.roots or [], gradients, strict=True)
        begun = [(root, gradient) for root, gradient in pairs if gradient is not None]
        if not keeps:
            self.roots = None
        return [root for root, _ in begun], [gradient for _, gradient in begun]

    def _end_backward(self, hand_on: HandOn) -> None:
        """Tell that the loss doesn't reach the input, if so."""
        wanted = sum(self.input_requires_grad)
        if wanted and (self.catch is None or not self.catch.has_taken):
            hand_on([None] * wanted)


class _Entry(torch.autograd.Function):
    """Catches the gradient of a micro-batch's input as autograd made it.

    A leaf's ``.grad`` has other strides.
    It is given tensors that nobody else has, because a layer may work in place. The graph begins at
    an empty leaf, for it would keep the input as long as itself. That gets no gradient, so one is
    enough for all.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, catch: _Catch, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.catch = catch
        ctx.set_materialize_grads(False)
        return tuple(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.catch.has_taken = True
        ctx.catch.take(gradients)
        return None, None, None


@cache
def _start(device: torch.device) -> Tensor:
    """The leaf at which graphs begin."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device).requires_grad_()


def _start_of(entry: Node) -> Tensor:
    """The leaf at which a graph begins."""
    start: Tensor = entry.next_functions[0][0].variable  # type: ignore[union-attr]
    return start


def _copied(leaf: Any) -> Any:
    return strides.copy(leaf) if isinstance(leaf, Tensor) else leaf


def _unchanged(leaf: Any) -> Any:
    """A leaf as it is; a view is copied, because its own views can't be changed in place."""
    return _copied(leaf) if isinstance(leaf, Tensor) and leaf._is_view() else leaf


def _detached(leaf: Any) -> Any:
    """A leaf in the same memory; layers may change it in place as if it were no view."""
    if not isinstance(leaf, Tensor):
        return leaf
    return _copied(leaf) if leaf.is_inference() else leaf.detach()


def _roots(outputs: Tree) -> list[GradientEdge]:
    """Where the backward begins. The outputs themselves needn't be kept for it.

    With torch 2.8 an edge doesn't keep a node that is written in Python: a view's node keeps it.
    """
    tensors = [t for t in outputs.tensors() if t.requires_grad]
    views = [t.view_as(t) if isinstance(t.grad_fn, BackwardCFunction) else t for t in tensors]
    return [get_gradient_edge(t) for t in views]


def _backward_to(
    weights: Sequence[nn.Parameter], edges: Sequence[GradientEdge], given: Sequence[Tensor]
) -> None:
    """Run a backward whose input's gradient is there already."""
    if edges and weights:
        torch.autograd.backward(edges, given, inputs=weights)
