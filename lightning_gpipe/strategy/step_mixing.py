"""Looks for a step that mixes the samples that it is given: it sees those of a micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.step_trace import StepTrace

_MIXED = (
    "The step mixes samples before the backbone: it computes with them and with what '{name}' makes"
    " of all of them. With step='micro-batch' that is of a micro-batch alone. Do it in"
    " on_after_batch_transfer, which sees the mini-batch, or use GPipeStrategy(step='mini-batch')."
)
#: Functions that make something of all samples.
_REDUCES = {"amax", "amin", "linalg_vector_norm", "logsumexp", "max", "mean", "median", "min"}
_REDUCES |= {"nanmean", "norm", "prod", "quantile", "std", "std_mean", "sum", "var", "var_mean"}


class _Made(NamedTuple):
    """What a tensor is made of.

    Args:
        tensor: The tensor.
        given: The place of what the step was given, of which it is made.
        mixer: The function that has put samples into another order, or has made something of all of
            them; None: it has the same samples, row by row.
    """

    tensor: weakref.ref[Tensor]
    given: int
    mixer: str | None


class StepMixing:
    """Warns, once, of a training step that mixes samples before the backbone, as mixup does.

    What is computed with a gradient is looked at by its graph, in ``engine/mixed_input.py``.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}  # by id
        self._samples = self._count = 0
        self._is_told = False

    def is_looked_at(self) -> bool:
        """Whether the steps of a mini-batch, which is about to begin, are to be followed."""
        self._count += 1
        return not self._is_told and is_due(self._count)

    def begin(self, given: Sequence[Tensor], samples: int) -> None:
        """Begin the step of a micro-batch.

        Args:
            given: The tensors in it.
            samples: How many it has.
        """
        self._samples = samples
        self._made = {
            id(tensor): _Made(weakref.ref(tensor), i, None)
            for i, tensor in enumerate(given)
            if samples > 1 and self._has_rows(tensor)
        }

    def follow(self, trace: StepTrace, ran: Ran) -> None:
        """Note what a function of a step has made; see :data:`step_trace.Follow`."""
        noted = (self._made.get(id(tensor)) for tensor in ran.given)
        found = [made for made in noted if made is not None and made.tensor() is not None]
        if self._is_told or trace.has_arrived or not found:
            return
        mixers = {made.given: made.mixer for made in found if made.mixer is not None}
        mixes = next((mixers[m.given] for m in found if not m.mixer and m.given in mixers), None)
        if mixes is not None:
            self._is_told = True
            rank_zero_warn(_MIXED.format(name=mixes))
            return
        given, mixer = found[0][1:]
        if ran.args and id(ran.args[0]) in self._made and _moves(ran.name, ran.args, ran.kwargs):
            if mixer is not None:
                return  # perhaps back
            mixer = ran.name
        elif any(made.given != given for made in found):
            return
        elif ran.name in _REDUCES and all(map(self._is_of_all, ran.made)):
            mixer = mixer or ran.name
        for tensor in ran.made:
            if not tensor.requires_grad and (mixer is not None or self._has_rows(tensor)):
                self._made[id(tensor)] = _Made(weakref.ref(tensor), given, mixer)

    def _is_of_all(self, tensor: Tensor) -> bool:
        """Whether it is made of all samples; whole numbers may be lengths, for a mask."""
        return tensor.is_floating_point() and not self._has_rows(tensor)

    def _has_rows(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and len(tensor) == self._samples


def _moves(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function puts the samples of a tensor into another order."""
    if name == "flipud":
        return True
    if name in ("flip", "roll"):
        dims = tree_leaves(kwargs.get("dims", args[1 if name == "flip" else 2 :] or 0))
        return 0 in dims or None in dims
    if name == "index_select":
        return 0 in (*args[1:2], kwargs.get("dim"))
    if name != "__getitem__":
        return False
    index, *others = args[1] if isinstance(args[1], tuple) and args[1] else [args[1]]
    if any(isinstance(other, (Tensor, list)) for other in others):  # something of each sample
        return False
    return isinstance(index, list) or (isinstance(index, Tensor) and index.dtype == torch.long)
