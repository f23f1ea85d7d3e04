"""Which tensors of a step have a row of each sample, as far as their shapes tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

#: Functions that take the dimensions as their third argument.
_DIM_IS_THIRD = {"norm", "linalg_norm", "linalg_vector_norm", "quantile", "nanquantile"}
#: Functions that make several tensors of the rows of one.
_PARTS = {"chunk", "narrow", "select", "split", "split_with_sizes", "tensor_split"}
_PARTS |= {"unbind", "unsafe_chunk", "unsafe_split"}
_FEATURES = 2**15  # that a mean over samples may have: every stage is told them


def may_be_rows(tensor: Tensor, *numbers: int) -> bool:
    """Whether a tensor may have rows of each sample, as everything may if there is one.

    Args:
        tensor: The tensor.
        numbers: How many samples there are, and how many rows were chosen of such tensors.
    """
    return tensor.ndim > 0 and any(tensor.shape[0] % max(number, 1) == 0 for number in numbers)


def chooses(name: str, args: Sequence[Any]) -> bool:
    """Whether a function chooses elements by a mask, or by their places."""
    if name in ("masked_select", "index_select"):
        return True
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    arrays = (list, np.ndarray)
    return any(isinstance(e, arrays) or (isinstance(e, Tensor) and e.ndim > 0) for e in index)


def is_of_all(tensor: Tensor, samples: int) -> bool:
    """Whether a tensor can't have a row, or a column, of each sample."""
    return all(size % max(samples, 1) for size in tensor.shape)


def takes_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> bool:
    """Whether a function takes the rows of samples one by one."""
    if name not in ("__getitem__", "select", "unbind") or not _is_given_first(args):
        return False
    rows, where = args[0], (*args[1:], *kwargs.values(), 0)[0]
    if name == "__getitem__":
        is_first = _is_number(where[0] if isinstance(where, tuple) and where else where)
    else:
        is_first = where in (0, -rows.ndim)
    rest = rows.shape[1:]
    return is_first and bool(rest) and len(rows) == samples and samples not in rest


def takes_some(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> bool:
    """Whether a function may take rows of some samples alone."""
    if (name != "__getitem__" and name not in _PARTS) or not _is_given_first(args):
        return False
    if name != "__getitem__":
        place = 1 if name in ("narrow", "select", "unbind") else 2
        dim = kwargs.get("dim", args[place] if len(args) > place else 0)
        is_some = dim != -1 and dim <= 0
    else:
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        is_some = _is_number(index) or (isinstance(index, slice) and index != slice(None))
    return is_some and args[0].ndim > 1 and may_be_rows(args[0], samples)


def are_of_features(
    name: str,
    given: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Tensor,
    samples: int,
) -> bool:
    """Whether a function that reduces dimensions gives a number for each feature, of all samples.

    Where another dimension may be that of the samples, it doesn't tell.
    """
    if not given.ndim or not made.ndim or made.numel() > _FEATURES:
        return False
    rows, *features = given.shape
    is_rows = rows == samples or (len(features) == 1 and may_be_rows(given, samples))
    return is_rows and samples not in features and _is_along_first(name, given, args, kwargs)


def _is_given_first(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor)


def _is_number(index: Any) -> bool:
    return type(index) is int or (isinstance(index, Tensor) and not index.ndim)


def _is_along_first(
    name: str, rows: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function that reduces dimensions reduces the first one."""
    place = 2 if name in _DIM_IS_THIRD else 1
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return any(type(each) is int and each % rows.ndim == 0 for each in dims)
