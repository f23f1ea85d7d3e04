"""Looks for values of a step that come of samples which it compares with each other.

A contrastive loss in validation, or how often a sample's nearest neighbour is of its class, is
another number where a step sees the samples of a micro-batch alone. No graph tells of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.step_trace import BACKBONE, Follow, StepTrace
from lightning_gpipe.strategy.step_rows import is_along_first, takes_one

_PRODUCTS = {"__matmul__", "inner", "linear", "matmul", "mm"}
_DISTANCES = {"cdist", "corrcoef", "cov", "pdist"}
#: Functions of the samples of a dimension, with the place of that among their arguments.
_ALONG = dict.fromkeys(("argsort", "cummax", "cummin", "cumprod", "cumsum", "flip", "sort"), 1)
_ALONG |= {"log_softmax": 1, "logcumsumexp": 1, "softmax": 1, "kthvalue": 2, "roll": 2, "topk": 2}
_LAST = {"argsort", "kthvalue", "sort", "topk"}  # take the last dimension, unless they are told


class Comparing:
    """Warns of logged and returned values for which samples are compared with each other."""

    def __init__(self) -> None:
        # what comes of samples, by id, and by which function they were compared, if they were
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._warned = set[str]()
        self._samples = 0

    @property
    def following(self) -> Follow | None:
        """What follows the step; None: it isn't looked at."""
        return self.follow if self._samples > 1 else None

    def begin(self, given: Sequence[Tensor], samples: int) -> None:
        """Begin the step of a micro-batch, and look at it.

        Args:
            given: The tensors in it.
            samples: How many it has.
        """
        self._known.clear()
        self._samples = samples
        self._note([t for t in given if t.ndim and len(t) == samples], "")

    def end(self) -> None:
        """Look no longer."""
        self._known.clear()
        self._samples = 0

    def follow(self, trace: StepTrace, ran: Ran) -> None:
        """Note what a function of the step has made; see :data:`step_trace.Follow`."""
        if ran.name == BACKBONE:
            self._note(ran.made, "")
            return
        found = [(t, by) for t in ran.given if (by := self._found(t)) is not None]
        if not found or takes_one(ran, self._samples):
            return
        by = next((by for _, by in found if by), "")
        rows = [t for t, _ in found]
        if not by and self._compares(ran, rows):
            by = ran.name.strip("_")
        self._note(ran.made, by)

    def tell(self, value: Any, what: str) -> None:
        """Warn, once, of a value for which samples are compared.

        Args:
            value: The value.
            what: What it is.
        """
        by = self._found(value) if self._samples > 1 and isinstance(value, Tensor) else None
        if by and not value.ndim and what not in self._warned:
            self._warned.add(what)
            rank_zero_warn(
                f"{what} comes of samples that '{by}' compares with each other: with"
                " step='micro-batch' those of a micro-batch alone. Compare them in a hook, such as"
                " on_validation_epoch_end, of what the steps have returned, or use"
                " GPipeStrategy(step='mini-batch')."
            )

    def tell_all(self, result: Any, what: str) -> None:
        """Warn, once each, of those of a step's results for which samples are compared."""
        self.tell(result, what)
        for name, value in result.items() if isinstance(result, Mapping) else ():
            self.tell(value, f"{what} as {name!r}")

    def _note(self, tensors: Sequence[Tensor], by: str) -> None:
        others = (t for t in tensors if not isinstance(t, nn.Parameter))  # may get no references
        self._known.update((id(tensor), (weakref.ref(tensor), by)) for tensor in others)

    def _found(self, tensor: Tensor) -> str | None:
        reference, by = self._known.get(id(tensor), (None, None))
        return by if reference is not None and reference() is tensor else None

    def _compares(self, ran: Ran, rows: Sequence[Tensor]) -> bool:
        """Whether a function compares the rows of samples with each other."""
        name, first = ran.name, rows[0]
        if name in _ALONG:
            default = -1 if name in _LAST else 0
            return self._is_of_samples(first, 0) and is_along_first(ran, _ALONG[name], default)
        if name in _DISTANCES:
            return first.ndim == 2 and self._is_of_samples(first, 0)
        if name == "einsum":
            return len(rows) == 2 and self._is_of_pairs(ran.made) and _is_outer(ran.args[0])
        if len(rows) < 2 or not self._is_of_pairs(ran.made):
            return False
        if name in _PRODUCTS:  # [N, F] x [F, N]; [F, N] x [N, F] is a sum over samples
            left, right = rows[-2:]
            return left.ndim == right.ndim == 2 and left.shape[1] != self._samples
        shapes = {tuple(t.shape[:2]) for t in rows}
        count = ran.made[0].shape[0]
        return (count, 1) in shapes and not shapes.isdisjoint({(1, count), (count,)})

    def _is_of_samples(self, tensor: Tensor, dim: int) -> bool:
        return tensor.ndim > dim and tensor.shape[dim] % self._samples == 0

    def _is_of_pairs(self, made: Sequence[Tensor]) -> bool:
        """Whether something has an entry for every two samples."""
        shape = made[0].shape if made else ()
        is_square = len(shape) > 1 and shape[0] == shape[1]
        return is_square and self._is_of_samples(made[0], 0)


def _is_outer(equation: Any) -> bool:
    """Whether an equation makes an entry for every two rows, as 'if,jf->ij' does."""
    if not isinstance(equation, str) or equation.count(",") != 1 or "->" not in equation:
        return False
    given, made = equation.replace(" ", "").split("->")
    left, right = given.split(",")
    rows = left[:1], right[:1]
    return tuple(made[:2]) == rows and rows[0] not in right and rows[1] not in left
