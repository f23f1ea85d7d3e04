"""Splits the batch that a data loader gives into micro-batches, and merges what steps return."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_gpipe.model.remote import told

#: The indices, keys and names of fields that lead to something in a batch.
KeyPath: TypeAlias = tuple[Any, ...]
_FEW = 1 << 16  # elements of a tensor up to which all are compared


def columns_of(value: Any) -> list[Tensor]:
    """The tensors in a batch, and NumPy's arrays of numbers as tensors."""
    return tensors_of(tree_map(_from_numpy, value))


def _from_numpy(leaf: Any) -> Any:
    is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    return torch.tensor(leaf, device="cpu") if is_array else leaf


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a batch: in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    if is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [t for field in fields for t in tensors_of(getattr(value, field.name))]
    return []


def lengths_of(batch: Any) -> set[int]:
    """The lengths of dimension 0 of the tensors in a batch."""
    plain = (t for t in tensors_of(batch) if t.layout == torch.strided and not t.is_nested)
    return {len(t) for t in plain if t.ndim}


@dataclasses.dataclass(slots=True)
class Places:
    """Where in the batches of a loader something is split by samples, and where not.

    Args:
        split: What has been.
        whole: What went to every micro-batch as it is; that stays so, however long it is.
    """

    split: set[KeyPath] = dataclasses.field(default_factory=set)
    whole: set[KeyPath] = dataclasses.field(default_factory=set)

    def tell(self, path: KeyPath, length: int, samples: int) -> bool:
        """Whether what stands at a place is split.

        Args:
            path: The place.
            length: Of what stands there.
            samples: How many the batch has.

        Raises:
            ValueError: If it was split before and can't be now.
        """
        if length != samples:
            if path in self.split:
                name = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"batch{name} has {length} rows where the batch's first tensor has {samples}."
                    " In batches before both were alike, and step='micro-batch' has split both by"
                    " samples. If they are samples, let all parts of the batch have as many:"
                    " DataLoader(drop_last=True), or CombinedLoader's mode 'min_size'. If not, make"
                    " it a buffer of the module, or give it the shape [1, ...]. Or use"
                    " GPipeStrategy(step='mini-batch')."
                )
            self.whole.add(path)
        if path in self.whole:
            return False
        self.split.add(path)
        return True


def split_batch(
    batch: Any, chunks: int, places: Places | None = None
) -> tuple[list[Any], list[int]]:
    """Split a batch along dimension 0.

    The first tensor that has a dimension tells the number of samples N. Tensors and arrays whose
    first dimension is N are split, and so are lists of N entries without tensors, and tuples of N
    strings (which is what ``default_collate`` makes of strings) or other objects, but for numbers;
    everything else goes to every micro-batch as it is.

    Args:
        batch: What the data loader gives: tensors in lists, tuples, mappings and dataclasses.
        chunks: M, the number of micro-batches wanted.
        places: What batches of the same loader have shown; what this one shows is added.

    Returns:
        The micro-batches, and their numbers of samples. They differ by one at most.

    Raises:
        ValueError: If the number of samples isn't known, or what was split has another one.
    """
    if chunks == 1:
        first = next((t for t in tensors_of(batch) if t.ndim), None)
        return [batch], [len(first) if first is not None and len(first) else 1]
    found = tensors_of(batch)
    other = next((t for t in found if t.layout != torch.strided or t.is_nested), None)
    if other is not None:
        kind = "nested tensor" if other.is_nested else f"tensor of layout {other.layout}"
        raise ValueError(
            f"The batch has a {kind}, which step='micro-batch' can't split. Let the loader give a"
            " tensor of shape [batch, ...], or use GPipeStrategy(step='mini-batch')."
        )
    first = next((t for t in found if t.ndim), None)
    if first is None:
        raise ValueError(
            f"The batch, a {type(batch).__name__}, has no tensor with a batch dimension, so"
            " step='micro-batch' can't split it: let the data loader give tensors of shape [batch,"
            " ...] in lists, tuples, dicts or dataclasses; or use GPipeStrategy(chunks=1)."
        )
    samples = first.shape[0]
    if not samples:
        raise ValueError("The batch has 0 samples (its first dimension is 0): nothing to split.")
    _check_ragged(batch)
    count = min(chunks, samples)
    sizes = [samples // count + (m < samples % count) for m in range(count)]
    ends = [sum(sizes[: m + 1]) for m in range(count)]
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    places = Places() if places is None else places
    return [_rows(batch, part, samples, places) for part in rows], sizes


def constant_tensor(before: Sequence[Tensor], now: Sequence[Tensor], samples: int) -> Tensor | None:
    """A tensor that is split, though it may be none with a row per sample; None: there is none.

    It is the same in two batches that differ, and its rows aren't all alike.

    Args:
        before: The heads of the tensors of a batch.
        now: The tensors of another one of the same loader.
        samples: How many that has.
    """
    pairs = list(zip(before, map(head, now), strict=False))
    if len(before) != len(now) or all(_are_equal(a, b) for a, b in pairs):
        return None
    flat = [(a, b) for a, b in pairs if b.shape == (samples,) and b.is_floating_point()]
    same = (b for a, b in flat if _are_equal(a, b))  # labels and masks may well be
    return next((t for t in same if not bool((t == t[0]).all())), None)


def changing_tensor(before: Sequence[Tensor], now: Sequence[Tensor], samples: int) -> Tensor | None:
    """A tensor that isn't split, though it may have a row per sample; None: there is none.

    It isn't the same in two batches, and has another number of rows than they have samples.

    Args:
        before: The heads of the tensors of a batch.
        now: The tensors of another one of the same loader.
        samples: How many that has.
    """
    if len(before) != len(now):
        return None
    pairs = zip(before, now, strict=True)
    others = ((a, b) for a, b in pairs if b.ndim and len(b) not in (1, samples))
    return next((b for a, b in others if not _are_equal(a, head(b))), None)


def head(tensor: Tensor) -> Tensor:
    """As much of a tensor as is compared."""
    return tensor if tensor.numel() <= _FEW else tensor[(0,) * (tensor.ndim - 1)][:64]


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and bool((tensor == other).all())


def _check_ragged(batch: Any) -> None:
    """Refuse a list of samples, of which the first one's first dimension looks like N."""
    for item in batch if isinstance(batch, (list, tuple)) else (batch,):
        if isinstance(item, (list, tuple)) and len(item) > 1:
            shapes = {tuple(t.shape) for t in item if isinstance(t, Tensor)}
            if len({shape[:1] for shape in shapes}) > 1 or any(
                isinstance(part, Mapping) for part in item
            ):
                raise ValueError(
                    "The batch has a list with an entry per sample, which step='micro-batch' can't"
                    " split: let collate_fn stack tensors to shape [batch, ...], padded to one"
                    " length."
                )


def _rows(value: Any, part: slice, samples: int, places: Places, *path: Any) -> Any:
    """The rows of a micro-batch; ``path`` says where in the batch the value stands."""
    if isinstance(value, Tensor):
        is_split = value.ndim and places.tell(path, len(value), samples)
        return _rows_of(value, part) if is_split else value
    if isinstance(value, np.ndarray):
        return value[part] if value.ndim and places.tell(path, len(value), samples) else value
    if isinstance(value, (list, tuple)):
        if _is_per_sample(value):
            return value[part] if places.tell(path, len(value), samples) else value
        items = [_rows(item, part, samples, places, *path, i) for i, item in enumerate(value)]
        return rebuilt(value, items)
    if isinstance(value, Mapping):
        rows = {key: _rows(item, part, samples, places, *path, key) for key, item in value.items()}
        return rebuilt(value, rows)
    if is_dataclass(value) and not isinstance(value, type):
        return _with_fields(
            value, lambda name, item: _rows(item, part, samples, places, *path, name)
        )
    return value


def _rows_of(tensor: Tensor, part: slice) -> Tensor:
    """Some rows of a tensor, of its class.

    They don't count changes of other rows, as views do: each micro-batch's step may change its own.
    """
    kind = type(tensor)
    if kind is Tensor:
        return tensor[part] if tensor.requires_grad else tensor[part].data
    if isinstance(tensor, nn.Parameter) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor[part]
    with torch._C.DisableTorchFunctionSubclass():
        rows: Tensor = tensor.as_subclass(Tensor)[part].as_subclass(kind)
    vars(rows).update(vars(tensor))
    return rows


def _with_fields(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """A copy of a dataclass's instance with other values; nothing else of it runs again."""
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, change(field.name, getattr(value, field.name)))
    return made


def _is_per_sample(value: Sequence[Any]) -> bool:
    if type(value) is tuple:
        others = (Tensor, np.ndarray, list, tuple, Mapping, int, float, complex)  # a size, say
        return not any(isinstance(entry, others) or is_dataclass(entry) for entry in value)
    return type(value) is list and not tensors_of(value)


def rebuilt(like: Any, items: Any) -> Any:
    """A collection of the same type."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    if isinstance(like, (dict, UserDict)) and type(like) is not dict:
        made = copy.copy(like)
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(like, Mapping) and type(like) is not dict:
        try:
            return type(like)(items)  # type: ignore[call-arg]
        except (TypeError, ValueError):
            return items
    return type(like)(items) if not isinstance(like, Mapping) else items


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
        fixed: The lengths of lists that steps of other batches returned, and that aren't per
            sample, by what they are; those of this batch are added.

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
        return _with_fields(
            first,
            lambda name, _: merge(
                [getattr(v, name) for v in values], sizes, weights, f"{what}.{name}", known, fixed
            ),
        )
    if type(first) is int:
        if list(values) == list(sizes):
            return sum(values)
        return first if all(value == first for value in values) else sum(values)
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
