"""What stands for the methods by which a module reaches its Trainer, where none runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

#: What does nothing without a Trainer.
_IDLE = (
    *("log", "log_dict", "print", "toggle_optimizer", "untoggle_optimizer"),
    *("manual_backward", "clip_gradients"),
)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever it is given."""


def stand_ins(optimizers: Sequence[Optimizer] | None) -> dict[str, Any]:
    """Functions for a module's attributes, by the names of the methods for which they stand.

    Args:
        optimizers: The module's; None: not known, and taken for one.
    """
    unknown: list[dict[str, Any]] = [{}]
    found = [_Idle(optimizer.param_groups) for optimizer in optimizers or ()] or [_Idle(unknown)]
    schedulers = [LambdaLR(optimizer, lambda _: 1.0) for optimizer in found]
    return {
        **dict.fromkeys(_IDLE, nothing),
        "optimizers": lambda use_pl_optimizer=True: _one_or_all(found),
        "lr_schedulers": lambda: _one_or_all(schedulers),
    }


def _one_or_all(found: list[Any]) -> Any:
    """What Lightning returns of several."""
    return found[0] if len(found) == 1 else found


class _Idle(SGD):
    """An optimizer that has a module's settings, and steps none of its weights.

    Args:
        groups: Those of the module's optimizer.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        weights = [nn.Parameter(torch.zeros((), device="cpu")) for _ in groups]
        own = [{**group, "params": [w]} for group, w in zip(groups, weights, strict=True)]
        super().__init__(own, lr=0.1)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Nothing, as a LightningOptimizer's with a single optimizer."""
        return nullcontext()
