"""Training steps that return None, by which Lightning skips a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_gpipe.comm.groups import Groups

_ONE_ALONE = (
    "training_step returned None on some stages and a loss on others: it must do the same on every"
    " rank, so nothing that depends on the rank may decide."
)


def agreed(step: Callable[..., Any], trainer: pl.Trainer, groups: Groups) -> Callable[..., Any]:
    """A training step that returns None on all ranks, or on none.

    Those of other replicas can't skip a batch with it. Where gradients accumulate, the stages sum
    them in the backward of the last batch, which so can't be skipped.

    Args:
        step: The step of a mini-batch.
        trainer: The Trainer.
        groups: The process groups.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        if (result := step(*args, **kwargs)) is not None:
            return result
        if groups.replicas > 1 or trainer.accumulate_grad_batches > 1:
            raise RuntimeError(
                "training_step returned None: is `return loss` missing? With several replicas, or"
                " with accumulate_grad_batches, several processes can't skip a batch: leave it out"
                " of the data, or make its loss finite, as torch.nan_to_num does."
            )
        # others may be about to begin a backward, which this tells them
        told, _ = groups.pipeline.broadcast("backward", (_ONE_ALONE, []), groups.stages - 1)
        if told != _ONE_ALONE:
            raise RuntimeError(_ONE_ALONE)
        return None

    is_one = groups.stages * groups.replicas == 1
    return step if is_one or not trainer.lightning_module.automatic_optimization else checked
