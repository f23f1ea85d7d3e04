"""Splits the batch that a data loader gives into micro-batches."""

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

from lightning_gpipe.tensors.number_lists import is_of_numbers, refusal

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


def has_lists(value: Any, samples: int) -> bool:
    """Whether a micro-batch has a list without tensors, with an entry for each of its samples."""
    if isinstance(value, Mapping):
        return any(has_lists(item, samples) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    is_one = type(value) is list and len(value) == samples and not tensors_of(value)
    return is_one or any(has_lists(item, samples) for item in value)


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
                    " drop_last=True, and with a CombinedLoader one batch_size, in each DataLoader."
                    " If not, make it a buffer of the module, or give it the shape [1, ...]. Or use"
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
    everything else goes to every micro-batch as it is. Tuples of N numbers, and lists of N tensors
    of one element, are refused where they are met first: nothing tells whether each is a sample's.

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
            " ...] in lists, tuples, dicts or dataclasses; or use GPipeStrategy(step='mini-batch')."
        )
    samples = first.shape[0]
    if not samples:
        raise ValueError(
            "The batch has 0 samples (its first dimension is 0): nothing to split. Let the data"
            " loader's sampler or collate_fn leave out empty batches."
        )
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
    first = next((t for t in tensors_of(batch) if t.ndim), None)
    for item in _entries(batch):
        if not isinstance(item, (list, tuple)) or len(item) < 2:
            continue
        own = tensors_of(item)
        rows = [len(t) for t in item if isinstance(t, Tensor) and t.ndim]
        lengths = set(rows)
        entries = (e for e in _entries(batch) if isinstance(e, (Tensor, Mapping)))
        others = {len(t) for e in entries for t in tensors_of(e) if t.ndim}  # of no other loader
        tells_length = first is not None and _is_in(first, own) and len(item) in others - lengths
        mappings = [part for part in item if isinstance(part, Mapping)]
        has_mapping = bool(own and mappings) and not _has_length(mappings, lengths)
        is_ragged = len(lengths) > 1 and rows[0] not in others
        if is_ragged or tells_length or has_mapping:
            raise ValueError(
                "The batch has a list with an entry per sample, which step='micro-batch' can't"
                " split: let collate_fn stack tensors to shape [batch, ...], padded to one"
                " length, or use GPipeStrategy(step='mini-batch')."
            )


def _has_length(mappings: Sequence[Mapping[Any, Any]], lengths: set[int]) -> bool:
    """Whether mappings stand beside a tensor of as many rows, and so aren't a sample's."""
    own = [{len(t) for t in tensors_of(mapping) if t.ndim} for mapping in mappings]
    return len(lengths) == 1 and all(lengths <= found for found in own)


def _entries(batch: Any) -> list[Any]:
    """What a batch consists of."""
    if isinstance(batch, Mapping):
        return [*batch.values()]
    return [*batch] if isinstance(batch, (list, tuple)) else [batch]


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is one for one in tensors)


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
        if is_of_numbers(value):
            if places.tell(path, len(value), samples):
                more = "" if tensors_of(value) else " or a list of numbers, which is split"
                raise refusal(value, "The batch", more)
            return value
        items = [_rows(item, part, samples, places, *path, i) for i, item in enumerate(value)]
        return rebuilt(value, items)
    if isinstance(value, Mapping):
        rows = {key: _rows(item, part, samples, places, *path, key) for key, item in value.items()}
        return rebuilt(value, rows)
    if is_dataclass(value) and not isinstance(value, type):
        return with_fields(
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


def with_fields(value: Any, change: Callable[[str, Any], Any]) -> Any:
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
