"""Which scalars of a step are means over its samples, by the functions that have made them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_gpipe.model.arithmetic import ADD, DIVIDE, MULTIPLY, NEGATE, SUBTRACT
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import origin_of

#: Functions that give a mean by default, beside those whose names end with "_loss".
MEANS = {"mean", "cross_entropy", "kl_div"}
MEANS |= {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_SAME = {"detach", "clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16"}
_SAME |= {"as_tensor", "asarray", "cpu", "cuda", "reshape", "squeeze", "view"}
_PARTS = {"__getitem__", "flatten", "select", "sum", "unbind"}
_SUMS = ADD | SUBTRACT
_MULTIPLES = MULTIPLY | DIVIDE | NEGATE


def is_mean(ran: Ran) -> bool:
    """Whether a function gave a mean over samples, if it gave a scalar."""
    name, given = ran.name, ran.given
    if name in MEANS or name.endswith("_loss"):
        return ran.kwargs.get("reduction", "mean") in ("mean", "batchmean")
    if name in _MULTIPLES and len(given) == 1:  # a mean times a number of samples is a sum
        others = (*ran.args, *ran.kwargs.values())
        return is_known_mean(given[0]) and not any(map(_may_count, others))
    if name in _SAME:  # as_tensor may be given a number
        return bool(given) and is_known_mean(given[0])
    return name in _SUMS and all(map(is_known_mean, given))


def is_linear(ran: Ran) -> bool:
    """Whether a function gave a sum, a multiple or a part of what it was given."""
    if ran.name in _SUMS:  # Python's sum begins with 0
        others = (v for v in (*ran.args, *ran.kwargs.values()) if not isinstance(v, Tensor))
        return all(value == 0 for value in others)
    is_multiple = ran.name in _MULTIPLES and len(ran.given) == 1
    return is_multiple or ran.name in _SAME or ran.name in _PARTS


def _may_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and float(value).is_integer()


def is_known_mean(tensor: Tensor) -> bool:
    """Whether a tensor is known to be a mean over samples, if it is a scalar."""
    origin = origin_of(tensor)
    return origin is not None and origin.is_mean
