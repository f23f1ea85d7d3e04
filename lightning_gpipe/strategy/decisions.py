"""What the steps of a mini-batch decide by values, each by those of its own samples."""

from __future__ import annotations

from collections import defaultdict

from lightning.pytorch.utilities import rank_zero_info

from lightning_gpipe.model.ran import Ran

_TOLD = (
    "The steps decide by values, such as `if mask.any()` or max(one, other) of two losses, and not"
    " alike for all micro-batches. With step='micro-batch' each decides by its own samples, and the"
    " loss is the mean of theirs; with one device the mini-batch's decide for all. Decide in"
    " on_after_batch_transfer, which sees the mini-batch, or use GPipeStrategy(step='mini-batch')."
)


class Decisions:
    """Follows the steps of a mini-batch."""

    def __init__(self) -> None:
        self._of: defaultdict[int, list[bool]] = defaultdict(list)  # each micro-batch
        self._has_told = False

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._of.clear()

    def follow(self, micro_batch: int, ran: Ran) -> None:
        """Note what a function tells, if that is whether something is so."""
        if isinstance(ran.result, bool):
            self._of[micro_batch].append(ran.result)

    def end(self, micro_batches: int, samples: int) -> None:
        """Tell, once in a run, of decisions that differ among micro-batches.

        Args:
            micro_batches: How many there are.
            samples: Of the last one. As many decisions may be of one sample each, as in a loop.
        """
        made = [self._of[m] for m in range(micro_batches)] if self._of else []
        if self._has_told or not any(each != made[0] for each in made):
            return
        if max(map(len, made)) < samples:
            self._has_told = True
            rank_zero_info(_TOLD)
