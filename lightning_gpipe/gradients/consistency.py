"""What must be the same on every stage, compared now and then.

Reading a tensor of another stage is an error at once; see :mod:`lightning_gpipe.model.elsewhere`.
But losses may differ without: by what layers and hooks keep of their micro-batches, or by the rank.
So may weights outside the backbone, by an optimizer that looks at all gradients together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.parameters import Slot

LOSS = 1e-3  # how much losses may differ, of theirs or 1: some kernels add up in any order
WEIGHTS = 1e-4  # how much the norm of a parameter may


class ConsistencyCheck:
    """Compares losses and replicated parameters of all stages in backwards that are due.

    Args:
        slots: What every stage holds, in the same order on every stage.
        groups: The process groups.
    """

    def __init__(self, slots: Sequence[Slot], groups: Groups) -> None:
        self._held = [s for s in slots if s.is_parameter and s.tensor.is_floating_point()]
        self._groups = groups
        self._backwards = 0

    def check(self, loss: Tensor) -> None:
        """Compare, if it is time to. Collective over the pipeline.

        Args:
            loss: What this stage differentiates.

        Raises:
            RuntimeError: With what may be the reason; on all stages.
        """
        self._backwards += 1
        if self._groups.stages > 1 and is_due(self._backwards):
            self._compare(loss)

    @torch.no_grad()
    def _compare(self, loss: Tensor) -> None:
        norms = (_norm(slot.tensor) for slot in self._held)
        marks = [loss.detach().sum().to(self._groups.device), *norms]
        lowest, highest = self._ends(torch.stack([mark.double() for mark in marks]))
        spread = highest - lowest
        coarse = 4 * torch.finfo(loss.dtype).eps  # of a loss in half precision
        if spread[0] > max(LOSS, coarse) * highest[0].abs().clamp(min=1):
            raise RuntimeError(
                f"The stages have different losses in the same step, from {lowest[0]:.6g} to"
                f" {highest[0]:.6g}. The step uses what not every stage has: what layers or hooks"
                " kept of the forward (return it with the backbone's output), what the reading of"
                " data has set (the first stage alone reads), a random generator made in the step"
                " without a seed, the rank, or a weight's device, which is 'meta' on other stages:"
                " use self.device."
            )
        differ = (spread[1:] > WEIGHTS * highest[1:]).nonzero().flatten()
        if len(differ):
            raise RuntimeError(
                f"Every stage holds {self._held[int(differ[0])].names[0]}, and they have set it to"
                " different values. What sets it looks at what one stage holds: an optimizer at the"
                " gradients of all its parameters together, or code at the rank. Or it was"
                " initialised or given noise after the Trainer started, which draws other numbers"
                " on each stage."
            )

    def _ends(self, marks: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest of every number on all stages."""
        both = torch.stack([-marks, marks])
        both = self._groups.pipeline.all_reduce(both, dist.ReduceOp.MAX)
        return -both[0], both[1]


def _norm(tensor: Tensor) -> Tensor:
    """A number that stands for the values."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    return norm
