"""Of which micro-batches the activations are re-materialized."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

CheckpointMode: TypeAlias = Literal["always", "except_last", "never"]

#: A mode; a whole number of micro-batches; or, from 0.0 to 1.0, a share of them.
Checkpoint: TypeAlias = CheckpointMode | int | float

CHECKPOINT_MODES: tuple[CheckpointMode, ...] = get_args(CheckpointMode)


def recomputed(checkpoint: Checkpoint, micro_batches: int) -> int:
    """The number of micro-batches of which the activations are re-materialized.

    The others keep them on every stage: those whose backward comes first.

    Args:
        checkpoint: See :data:`Checkpoint`. A share is rounded up.
        micro_batches: M.
    """
    if checkpoint == "always":
        return micro_batches
    if checkpoint == "except_last":
        return micro_batches - 1
    if checkpoint == "never":
        return 0
    if isinstance(checkpoint, float):
        return min(micro_batches, -int(-checkpoint * micro_batches // 1))
    return min(micro_batches, int(checkpoint))
