"""The backwards of what stands outside the backbone, where steps run once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.engine.autograd import (
    NO_GRADIENT,
    Behind,
    CatchGradients,
    ExitNode,
    LayerForwards,
    no_values,
    run_backward,
)
from lightning_gpipe.engine.running import AFTER, BEFORE, Outcome, Running
from lightning_gpipe.tensors.tree import Tree

_OWN_BACKWARD = (
    "The step runs a backward through the backbone, which with step='micro-batch' the loss that it"
    " returns alone has: for gradients of an input call the module outside the Trainer."
)


class Outside:
    """Runs the backwards from losses to the backbone's output, and from its input on.

    Args:
        device: Where this rank computes.
        parameters: The module's parameters by ``id``.
        is_alone: Whether one rank runs the whole pipeline.
    """

    def __init__(self, device: torch.device, parameters: frozenset[int], is_alone: bool) -> None:
        self._known, self._is_alone, self._differentiates = parameters, is_alone, False
        #: The leaf on which the backbone's output depends here.
        self.root = torch.zeros((), device=device, requires_grad=True)
        #: When the layers ran in this step.
        self.forwards = LayerForwards()
        #: Parameters of which the gradients of both sides are kept apart, on a rank that has both.
        self.on_both_sides: Sequence[nn.Parameter] = ()
        #: Their gradients before the backbone.
        self.aside: dict[nn.Parameter, Tensor] = {}

    def with_graph(self, running: Running, m: int, tree: Tree, flags: Sequence[bool]) -> list[Any]:
        """The output's leaves; those that want a gradient with a node that catches it."""
        leaves = list(tree.leaves)
        wanted = [i for i, wants in enumerate(flags) if wants]
        if wanted:
            made, given = [leaves[i] for i in wanted], running.source.wanted(m)
            joined = ExitNode.apply(self._caught(running, m), self.root, made, given)
            for i, leaf in zip(wanted, joined, strict=True):
                leaves[i] = leaf
        return leaves

    def _caught(self, running: Running, m: int) -> CatchGradients:
        """What takes the gradients of a micro-batch's output, in the loss's backward alone."""
        catch = running.target.catch(m)

        def take(gradients: Sequence[Tensor | None]) -> None:
            if not self._differentiates:
                raise RuntimeError(_OWN_BACKWARD)
            catch(gradients)

        return take

    def differentiate(self, running: Running, m: int, outcome: Outcome) -> None:
        """Run the backward of a loss up to the backbone's output."""
        loss = outcome.loss
        if loss is None:
            raise RuntimeError(f"The step of micro-batch {m} gave no loss.")
        if not loss.requires_grad:
            raise RuntimeError(NO_GRADIENT)
        if m == 0:
            if (problem := no_values("The loss", [loss])) is not None:
                raise RuntimeError(problem)
            self._check_origins(loss)
        roots, seeds = [], []
        seed = running.weighting.seed(m)
        # with the weight 0, a mean over nothing has gradients, of zeros, by which momentum moves
        # weights; another loss shall not count, and may have any
        if seed or not bool(loss.detach()):
            roots, seeds = [loss], [torch.full_like(loss, seed)]
        self._differentiates = True
        try:
            self._run_backward(running, m, AFTER, roots, seeds)
        finally:
            self._differentiates = False
        running.outcomes[m] = Outcome(weight=outcome.weight)  # lets go of the graph

    def backward_before(self, running: Running, m: int) -> None:
        """Run the backward of what stands before the backbone."""
        roots, seeds = running.source.roots(m)
        with self._apart() if self.on_both_sides else nullcontext():
            self._run_backward(running, m, BEFORE, roots, seeds)

    def _run_backward(
        self,
        running: Running,
        m: int,
        side: int,
        roots: list[Tensor],
        seeds: list[Tensor],
    ) -> None:
        also = running.before(side) if m == len(running.sizes) - 1 else None
        if also is not None:
            roots, seeds = [*roots, also], [*seeds, torch.ones_like(also)]
        if roots:  # with one rank both sides may go through the same graph
            retain = self._is_alone and side == AFTER
            run_backward(roots, seeds, retain)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep what is added to gradients inside this context apart."""
        behind = [(p, p.grad) for p in self.on_both_sides]
        for p, _ in behind:
            p.grad = self.aside.pop(p, None)
        try:
            yield
        finally:
            for p, gradient in behind:
                if p.grad is not None:
                    self.aside[p] = p.grad
                p.grad = gradient

    def join_sides(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add the gradients of both sides, as two ranks do.

        Args:
            parameters: Of which; None: of all.
        """
        for p in list(self.aside if parameters is None else parameters):
            gradient = self.aside.pop(p, None)
            if gradient is not None:
                p.grad = gradient if p.grad is None else gradient + p.grad

    def _check_origins(self, loss: Tensor) -> None:
        behind, known = Behind.of([loss]), self._known | {id(self.root)}
        if (problem := self.forwards.problem(behind)) is not None:
            raise RuntimeError(problem)
        strangers = [leaf for leaf in behind.leaves if id(leaf) not in known]
        if not self._is_alone and strangers:
            raise RuntimeError(
                f"A tensor of shape {tuple(strangers[0].shape)} requires a gradient and is no"
                " parameter of the module, so only the last stage would have its gradient. Make it"
                " an nn.Parameter of the module. If its gradient isn't wanted, detach it."
            )
