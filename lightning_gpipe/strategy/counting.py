"""What the means that a step computes are over."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lightning_gpipe.model.means import MEANS
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.step_trace import StepTrace

#: Losses that are means over the targets that count, by the weights of their classes.
_SKIPPING, _IGNORED = {"cross_entropy", "nll_loss"}, -100
#: A mean over what its arguments' shapes don't tell.
_UNKNOWN = "ctc_loss"
#: Losses that are means by the weights of their elements.
_BY_WEIGHT = {"mse_loss", "l1_loss"}


def count_of(trace: StepTrace, ran: Ran) -> Tensor | None:
    """What a mean is over: elements, or targets that count.

    Args:
        trace: Follows the step.
        ran: The function that has made it.

    Returns:
        Their number, or one in proportion to it; None: it isn't known.
    """
    name = ran.name
    given = dict(zip(("input", "target", "weight"), ran.args, strict=False)) | {**ran.kwargs}
    targets, weights = cast(Tensor, given.get("target")), given.get("weight")
    skips = name in _SKIPPING and not targets.is_floating_point()
    by_weight = name in _BY_WEIGHT and weights is not None
    if not skips and not by_weight:
        return _number_of(ran)
    if trace.where((targets, weights) if skips else weights) is not None:
        return None
    if by_weight:
        return cast(Tensor, weights).sum()
    counted: Tensor = targets != given.get("ignore_index", _IGNORED)
    if weights is not None:
        counted = weights[torch.where(counted, targets, 0)] * counted
    return counted.sum()


def _number_of(ran: Ran) -> Tensor | None:
    """Over how many elements, or in proportion to them, a function takes a mean.

    None: it isn't known.
    """
    name, given = ran.name, ran.given
    if name == "kl_div" and ran.kwargs.get("reduction") == "batchmean":
        number = len(given[0])
    elif (name in MEANS or name.endswith("_loss")) and name != _UNKNOWN:
        number = max(tensor.numel() for tensor in given[:2])
    else:
        return None
    return torch.tensor(number, device="cpu")
