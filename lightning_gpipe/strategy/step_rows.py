"""Which tensors of a step have a row of each sample, as far as their shapes tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gpipe.model.ran import Ran

#: Functions that take the dimensions as their third argument.
_DIM_IS_THIRD = {"norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile"}
#: Functions that make several tensors of the rows of one.
_PARTS = {"chunk", "narrow", "select", "split", "split_with_sizes", "tensor_split"}
_PARTS |= {"unbind", "unsafe_chunk", "unsafe_split"}
#: Functions that may choose elements, or take rows of some samples alone.
CHOOSING = {"__getitem__", "index_select", "masked_select", *_PARTS}
#: Functions that compare, or pair, the rows of a tensor, and the place of the dimension.
_RANKING = {"flip": 1, "msort": 1, "sort": 1, "median": 1, "nanmedian": 1, "std": 1, "var": 1}
_RANKING |= {"kthvalue": 2, "quantile": 2, "nanquantile": 2, "roll": 2, "topk": 2, "batch_norm": 0}
_FEATURES = 2**15  # that a mean over samples may have: every stage is told them


def may_be_rows(tensor: Tensor, *numbers: int) -> bool:
    """Whether a tensor may have rows of each sample, as everything may if there is one.

    Args:
        tensor: The tensor.
        numbers: How many samples there are, and how many rows were chosen of such tensors.
    """
    return tensor.ndim > 0 and any(tensor.shape[0] % max(number, 1) == 0 for number in numbers)


def chooses(ran: Ran) -> bool:
    """Whether a function has chosen elements by a mask, or by their places."""
    if ran.name in ("masked_select", "index_select"):
        return True
    if ran.name != "__getitem__":
        return False
    index = ran.args[1] if isinstance(ran.args[1], tuple) else (ran.args[1],)
    arrays = (list, np.ndarray)
    return any(isinstance(e, arrays) or (isinstance(e, Tensor) and e.ndim > 0) for e in index)


def moves_rows(ran: Ran) -> bool:
    """Whether a function may put rows into another order."""
    return ran.name in ("flip", "flipud", "gather", "roll", "sort") or chooses(ran)


def ranks_rows(ran: Ran, samples: int) -> bool:
    """Whether a function compares, or pairs, what may be the rows of samples."""
    place = _RANKING.get(ran.name)
    if place is None or not may_be_rows(ran.given[0], samples):
        return False
    return ran.given[0].ndim == 1 or not place or _is_along_first(ran, place)


def is_of_all(tensor: Tensor, samples: int) -> bool:
    """Whether a tensor can't have a row, or a column, of each sample."""
    return all(size % max(samples, 1) for size in tensor.shape)


def takes_one(ran: Ran, samples: int) -> bool:
    """Whether a function has taken the rows of samples one by one."""
    name, args = ran.name, ran.args
    if name not in ("__getitem__", "select", "unbind") or not _is_given_first(args):
        return False
    rows, where = args[0], (*args[1:], *ran.kwargs.values(), 0)[0]
    if name == "__getitem__":
        is_first = _is_number(where[0] if isinstance(where, tuple) and where else where)
    else:
        is_first = where in (0, -rows.ndim)
    rest = rows.shape[1:]
    return is_first and bool(rest) and len(rows) == samples and samples not in rest


def takes_some(ran: Ran, samples: int) -> bool:
    """Whether a function may have taken rows of some samples alone."""
    name, args = ran.name, ran.args
    if (name != "__getitem__" and name not in _PARTS) or not _is_given_first(args):
        return False
    if name != "__getitem__":
        place = 1 if name in ("narrow", "select", "unbind") else 2
        dim = ran.kwargs.get("dim", args[place] if len(args) > place else 0)
        is_some = dim != -1 and dim <= 0
    else:
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_some = _is_number(index) or (isinstance(index, slice) and index != slice(None))
    return is_some and args[0].ndim > 1 and may_be_rows(args[0], samples)


def are_of_features(ran: Ran, made: Tensor, samples: int) -> bool:
    """Whether a function that reduces dimensions gave a number for each feature, of all samples.

    Where another dimension may be that of the samples, it doesn't tell.
    """
    given = ran.given[0]
    if not given.ndim or not made.ndim or made.numel() > _FEATURES:
        return False
    rows, *features = given.shape
    place = 2 if ran.name in _DIM_IS_THIRD else 1
    is_rows = rows == samples or (len(features) == 1 and may_be_rows(given, samples))
    return is_rows and samples not in features and _is_along_first(ran, place)


def _is_given_first(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _is_number(index: Any) -> bool:
    return type(index) is int or (isinstance(index, Tensor) and not index.ndim)


def _is_along_first(ran: Ran, place: int) -> bool:
    """Whether a function works along the first dimension.

    Args:
        ran: The function, of a tensor that has dimensions.
        place: The place of the dimension, or dimensions, among its arguments.
    """
    named = [ran.kwargs[name] for name in ("dim", "dims", "axis") if name in ran.kwargs]
    dim = [*named, *ran.args[place : place + 1], None][0]
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return any(type(each) is int and each % ran.given[0].ndim == 0 for each in dims)
