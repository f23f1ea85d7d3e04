"""What functions give, without values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only

from lightning_gpipe.model.on_meta import Pretended
from lightning_gpipe.model.remote import CONSTANTS, on_meta, tensors_given, told
from lightning_gpipe.tensors import strides

_REMEMBERED = 1000


class Outlines:
    """Runs functions on the meta device, for every kind of arguments once.

    On the meta device many functions are written in Python, and take longer than on a GPU. Under
    autocast, which it doesn't know, tensors pass for ones of the real device.

    Args:
        device: Where the stage computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The leaves of a result, and the structure around them."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            func, args, kwargs = _without_masks(func, args, kwargs)
            try:
                kinds = *map(_kind_of, args), *((key, _kind_of(v)) for key, v in kwargs.items())
                dtypes = torch.get_default_dtype(), self._cast
                kind = func, *dtypes, len(args), *kinds
                known = self._known.get(kind)
            except TypeError:  # an argument can't be hashed
                return tree_flatten(self._run(func, *tree_map(on_meta, (args, kwargs))))
            if known is None:
                known = tree_flatten(self._run(func, *tree_map(on_meta, (args, kwargs))))
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[kind] = known
            return known

    @property
    def _cast(self) -> torch.dtype | None:
        """The type of autocast; None: it is off."""
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._cast is not None:
            place = Pretended(self._device)
            own_args, own_kwargs = tree_map_only(Tensor, place.like, (args, kwargs))
            with suppress(Exception):  # that needs more than the meta device does
                with place.mode:
                    made = func(*own_args, **own_kwargs)
                return tree_map_only(Tensor, partial(strides.empty_like, device="meta"), made)
        return _outline(func, args, kwargs)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    return F.gaussian_nll_loss(input, target, 1.0, full, eps, reduction)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    samples = log_probs.shape[1:2] if log_probs.dim() == 3 else ()
    return log_probs.new_empty(samples if reduction == "none" else ())


#: In place of functions that read values, or that the meta device doesn't have.
_INSTEAD: dict[Any, Callable[..., Tensor]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.ctc_loss: _ctc_loss,
}


def _without_masks(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call that chooses elements by masks whose values are here, with their places instead.

    How many elements a mask chooses, the meta device doesn't know.
    """
    if func is Tensor.__getitem__:
        tensor, index = args
    elif func in _BY_MASK and (given := _given_to_select(*args, **kwargs)) is not None:
        tensor, index = torch.broadcast_tensors(*given)
    else:
        return func, args, kwargs
    entries = list(map(_entry, index)) if isinstance(index, tuple) else [_entry(index)]
    if not any(map(_is_mask, entries)):
        return func, args, kwargs
    places = map(_places, entries)
    return Tensor.__getitem__, (tensor, tuple(chain.from_iterable(places))), {}


_BY_MASK = torch.masked_select, Tensor.masked_select


def _given_to_select(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor] | None:
    """The tensor and the mask, however they are given."""
    given = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    return (given["input"], given["mask"]) if given.keys() == {"input", "mask"} else None


def _entry(entry: Any) -> Any:
    """An entry of an index, with a tensor for a mask of another kind."""
    is_list = isinstance(entry, list) and bool(entry) and all(type(each) is bool for each in entry)
    if is_list or (isinstance(entry, np.ndarray) and entry.dtype == np.bool_):
        return torch.tensor(entry, device="cpu")
    return told(entry)


def _is_mask(entry: Any) -> bool:
    """Whether an index is a mask that is here."""
    is_here = isinstance(entry, Tensor) and not entry.is_meta
    return is_here and entry.dtype in (torch.bool, torch.uint8)


def _places(entry: Any) -> tuple[Any, ...]:
    """What chooses the same as an entry of an index."""
    if not _is_mask(entry):
        return (entry,)
    places: tuple[Any, ...] = entry.nonzero(as_tuple=True) if entry.ndim else (bool(entry),)
    return places


def _kind_of(value: Any) -> Any:
    """What tells arguments apart, but the values of tensors."""
    kind = type(value)
    if kind in CONSTANTS:
        return kind, value
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return kind, *map(_kind_of, value)
    if isinstance(value, dict):
        return dict, *((key, _kind_of(item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, _kind_of(value.start), _kind_of(value.stop), _kind_of(value.step)
    return kind, value


def _outline(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a function on the meta device."""
    func = _INSTEAD.get(func, func)
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        floats = [t.dtype for t in tensors_given(args, kwargs) if t.is_floating_point()]
        if len(set(floats)) < 2:
            raise
        widest = torch.float64 if torch.float64 in floats else torch.float32
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.to(widest) if t.is_floating_point() else t, (args, kwargs)
        )
        return func(*args, **kwargs)
