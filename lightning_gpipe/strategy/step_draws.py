"""Refuses optimizers whose steps draw random numbers: each stage would draw for its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.state.optimizer_shards import after_closure
from lightning_gpipe.tensors.random_state import DrawsNoted


@contextmanager
def refused(optimizers: Sequence[Optimizer], groups: Groups) -> Iterator[None]:
    """Refuse, inside this context, a step over several stages that has drawn random numbers.

    What its closure draws, which computes the gradients, is the same on all stages.

    Args:
        optimizers: The optimizers.
        groups: The process groups.
    """
    watches = [_Watch(groups.device) for _ in optimizers if groups.stages > 1]
    handles = [
        handle
        for watch, optimizer in zip(watches, optimizers, strict=False)  # none, or one each
        for handle in (
            optimizer.register_step_pre_hook(watch.begin),
            optimizer.register_step_post_hook(watch.end),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """Looks at the steps of an optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted: DrawsNoted | None = None

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before a step: note what the generators are like, or let its closure do it at its end."""
        self._noted = None
        return after_closure(args, kwargs, self._note)

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """After it, or after one of the class that its own step calls."""
        if self._noted is not None and self._noted.has_drawn():
            raise RuntimeError(
                f"{type(optimizer).__name__} draws random numbers in its step, and each stage steps"
                " its own parameters: the weights would depend on the number of stages. Use one"
                " stage, or an optimizer that draws from a torch.Generator for each parameter."
            )

    def _note(self) -> None:
        self._noted = DrawsNoted(self._device)
