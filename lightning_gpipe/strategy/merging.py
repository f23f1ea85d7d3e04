"""Merges what the steps of micro-batches return to what that of the mini-batch would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gpipe.model.remote import told
from lightning_gpipe.strategy.batches import rebuilt, with_fields


class Argument(int):
    """A whole number that a step is given, such as ``batch_idx``; what it computes of it is none.

    Returned, it would look like a count of samples where these are as many.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def merge(
    values: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    what: str,
    known: Callable[[Sequence[Tensor], str], Tensor | None] = lambda values, what: None,
    fixed: dict[str, int] | None = None,
) -> Any:
    """What the step would have returned for the whole batch.

    Values per sample are put together, means taken by weight, whole numbers that differ summed.
    A list with an entry per sample is one for all samples.

    Args:
        values: What the steps of the micro-batches have returned.
        sizes: Samples in each micro-batch.
        weights: How much each of them counts.
        what: What it is, for the error.
        known: Gives that for a tensor if it is known otherwise.
        fixed: The lengths of lists and the whole numbers that steps of other batches returned, and
            that aren't those of samples, by what they are; those of this batch are added.

    Raises:
        ValueError: If it isn't known how.
    """
    fixed = {} if fixed is None else fixed
    first = values[0]
    if len(values) == 1 or (first is None and all(value is None for value in values)):
        return first
    if any(type(value) is not type(first) for value in values) and not isinstance(first, Tensor):
        raise _unknown(what, "values of different types")
    if isinstance(first, Tensor):
        found = known(values, what)
        return _merge_tensors(list(values), sizes, weights, what) if found is None else found
    if isinstance(first, np.ndarray):
        return _merge_arrays(values, sizes, what)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _unknown(what, "mappings with different keys")
        keys = {
            key: merge([v[key] for v in values], sizes, weights, f"{what}[{key!r}]", known, fixed)
            for key in first
        }
        return rebuilt(first, keys)
    if isinstance(first, (list, tuple)):
        lengths = [len(value) for value in values]
        if type(first) is list and lengths == list(sizes) and fixed.get(what) != lengths[0]:
            if not _per_sample(first, sizes[0]):
                return [item for value in values for item in value]
            if len(first) > 1:
                raise _unknown(
                    what,
                    f"lists of {len(first)} tensors with {len(first)} rows each, which may be one"
                    " per sample or not (a tuple isn't)",
                )
        if any(length != lengths[0] for length in lengths):
            raise _unknown(what, "lists of different lengths")
        if lengths != list(sizes):
            fixed[what] = lengths[0]
        columns = enumerate(zip(*values, strict=True))
        merged = [merge(c, sizes, weights, f"{what}[{i}]", known, fixed) for i, c in columns]
        return rebuilt(first, merged)
    if is_dataclass(first) and not isinstance(first, type):
        return with_fields(
            first,
            lambda name, _: merge(
                [getattr(v, name) for v in values], sizes, weights, f"{what}.{name}", known, fixed
            ),
        )
    if type(first) is Argument:
        return int(first)
    if type(first) is int:
        is_one, are_sizes = all(value == first for value in values), list(values) == list(sizes)
        if is_one and not are_sizes:
            fixed[what] = first
        return first if is_one and (not are_sizes or what in fixed) else sum(values)
    if type(first) is float:
        return weighted_mean(values, weights)
    if any(value != first for value in values):
        raise _unknown(what, f"different values of type {type(first).__name__}")
    return first


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of numbers or tensors; those with the weight 0 may be anything."""
    total = sum(weights)
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    if not counted:
        return values[0] * 0.0
    return sum(told(v) * (w / total) for v, w in counted)  # plain tensors are faster


def _per_sample(items: list[Any], size: int) -> bool:
    """Whether entries of a list are tensors with a row per sample."""
    return any(isinstance(t, Tensor) and t.ndim and t.shape[0] == size for t in items)


def _merge_tensors(
    values: list[Tensor], sizes: Sequence[int], weights: Sequence[float], what: str
) -> Tensor:
    first = values[0]
    if first.ndim and [len(value) for value in values] == list(sizes):
        return torch.cat(values)
    if first.ndim == 0 and (first.is_floating_point() or first.is_complex()):
        mean: Tensor = weighted_mean(values, weights)
        return mean
    if first.ndim == 0 and first.dtype != torch.bool:
        return torch.stack(values).sum()
    if all(value.shape == first.shape and torch.equal(value, first) for value in values):
        return first
    raise _unknown(what, f"tensors of shapes {[tuple(value.shape) for value in values]}")


def _merge_arrays(values: Sequence[Any], sizes: Sequence[int], what: str) -> Any:
    first = values[0]
    if first.ndim and [len(value) for value in values] == list(sizes):
        return np.concatenate(values)
    if all(np.array_equal(value, first) for value in values):
        return first
    raise _unknown(what, f"arrays of shapes {[value.shape for value in values]}")


def _unknown(what: str, why: str) -> ValueError:
    return ValueError(
        f"{what} can't be merged: the micro-batches gave {why}. Return values per sample, shape"
        " [batch, ...], or means, shape []; or use GPipeStrategy(step='mini-batch')."
    )
