"""Looks at the graphs of steps that run once per micro-batch, for what makes weights differ."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.engine.mixed_input import MixedInput
from lightning_gpipe.engine.reduction import Reductions
from lightning_gpipe.engine.running import Outcome, Running
from lightning_gpipe.tensors import hooks


class StepLooks:
    """What is looked at in a step: the backbone's input on the first stage, the loss on the last.

    A graph may be run once more where nothing but computing comes of it: no hook is called, and no
    statistics are taken.

    Args:
        groups: This rank's.
        root: The leaf behind which the graph of the backbone's output is.
        batch_norm: Batch norm outside the backbone.
    """

    def __init__(self, groups: Groups, root: Tensor, batch_norm: DeferredBatchNorm) -> None:
        self._batch_norm = batch_norm
        self._mixed_input = MixedInput(not groups.is_first or groups.replica > 0)
        self._reductions = Reductions(root, not groups.is_last or groups.replica > 0)
        self._data: Sequence[Tensor] = ()  # what the step was given, if that may be looked for
        self._hooked = 0  # hooks when the step began, or the backbone's call was through

    def begin(self) -> None:
        """Begin a step, or go on with it behind the backbone's call."""
        self._hooked = hooks.count()

    def at_input(self, running: Running, given: Sequence[Tensor], is_due: bool) -> None:
        """Look at what the backbone is given.

        Args:
            running: The mini-batch.
            given: The tensors.
            is_due: Whether it is time for a look.
        """
        m = running.m
        self._data = running.given[m] if self._may_repeat() else ()
        if is_due and running.before_last is not None and len(running.sizes) > 1:
            self._mixed_input.look(running.sizes[m], self._data, given)

    def at_loss(self, running: Running, outcome: Outcome) -> None:
        """Look at a loss, before its backward."""
        if len(running.sizes) > 1:
            self._reductions.look(running, self._data, outcome, self._may_repeat())

    def finish(self, running: Running) -> None:
        """End a mini-batch: warn of its losses, and let go of its data."""
        self._data = ()
        self._reductions.warn(running)

    def _may_repeat(self) -> bool:
        return hooks.count() == self._hooked and not self._batch_norm.trains
