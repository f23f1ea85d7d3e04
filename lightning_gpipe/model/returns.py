"""What a block returns, as far as a run of it without data tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from lightning_gpipe.model.dry_runs import CantRun, DryRuns


@dataclass(frozen=True, slots=True)
class Returns:
    """What a block returns.

    Args:
        spec: The structure of a tuple, a dictionary and the like, whose first leaf is the hidden
            state; None: it is a tensor, or that isn't known.
        unsplit: Which leaves have the batch elsewhere than in dimension 0.
        is_known: Whether a run without data told.
        first: What stands in place of the hidden state; empty: it does.
        why_not: Why it can't run without data; empty: it can, or hasn't.
    """

    spec: TreeSpec | None = None
    unsplit: frozenset[int] = frozenset()
    is_known: bool = False
    first: str = ""
    why_not: str = ""

    @classmethod
    def of(cls, dry_runs: DryRuns, module: nn.Module, args: Any, kwargs: Any) -> Returns:
        """What a module returns, by a run without data.

        Args:
            dry_runs: Runs it.
            module: The block, or a part of one.
            args: What it is called with, on the meta device.
            kwargs: The same.
        """
        returned = dry_runs.returned(module, *tree_flatten((args, kwargs)))
        if isinstance(returned, CantRun):
            return cls(why_not=returned.why)
        leaves, spec = tree_flatten(returned)
        if spec.is_leaf() or not leaves:
            return cls(is_known=isinstance(returned, Tensor))
        what = ""
        if not isinstance(leaves[0], Tensor):
            what = type(leaves[0]).__name__
        elif not leaves[0].ndim:
            what = "a tensor without dimensions"
        return cls(spec, _unsplit(leaves), is_known=True, first=what)


def _unsplit(leaves: Sequence[Any]) -> frozenset[int]:
    """Which leaves have the batch in another dimension, as a recurrent state has."""
    if not isinstance(leaves[0], Tensor) or not leaves[0].dim():
        return frozenset()
    n = len(leaves[0])
    return frozenset(
        i
        for i, t in enumerate(leaves)
        if isinstance(t, Tensor) and t.dim() > 1 and len(t) != n and n in t.shape[1:]
    )
