"""What a model's loop may do with hidden states between two blocks: what works sample by sample.

Such a function can run with the block that comes next, on the block's stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gpipe.model.promise import refusal
from lightning_gpipe.model.sample_wise import CHECKS, ELEMENTWISE, OF_ROWS, Check, Look, listed


@dataclass(frozen=True, slots=True)
class Function:
    """One that may stand between two blocks.

    Args:
        name: How a program calls it.
        run: The function.
        check: Whether a call works sample by sample; None: element by element.
        is_in_place: Whether the one that was called changes its first argument; this doesn't.
        of_samples: The name of a function that does the same, given the shape of a sample of the
            result in place of the other arguments; empty: it runs as it was called.
    """

    name: str
    run: Callable[..., Any]
    check: Check | None
    is_in_place: bool = False
    of_samples: str = ""

    def _is_linear(self, looks: int, args: Sequence[Any]) -> bool:
        name = self.name.rpartition(".")[2]
        is_scaled = looks == 1 and (name[0] == "m" or isinstance(args[0], Look))
        return name in _SUMS or (name in _SCALES and is_scaled)

    @property
    def may_share(self) -> bool:
        """Whether its result may be its argument, or share its memory, as that lies there."""
        return self.name.rpartition(".")[2] in _SHARING

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int] | None:
        """Look whether a call works sample by sample.

        Args:
            args: What it is called with: hidden states, other tensors, and constants.
            kwargs: The same.

        Returns:
            The ``id`` of each tensor that is the same for all samples; None: it doesn't.
        """
        given = listed((*args, *kwargs.values()))
        hidden = [t for t in given if isinstance(t, Look)]
        others = [t for t in given if isinstance(t, Tensor)]
        ndim = hidden[0].ndim
        if kwargs.get("out") is not None:
            return None
        if self.check is not None and not (args and self.check(args, kwargs)):
            return None
        if not ndim and not self._is_linear(len(hidden), args):
            return None
        if self.name not in _OF_ANY and any(t.ndim != ndim for t in hidden):
            return None
        if self.name in OF_ROWS:
            return set() if all(t.ndim == ndim for t in others) else None
        if self.check is not None:
            return {id(t) for t in others}
        if any(t.ndim > ndim for t in others):
            return None
        return {id(t) for t in others if t.ndim < ndim}


#: What may be done with numbers of a micro-batch: what gives a mean of means.
_SUMS = {
    "add",
    "clone",
    "detach",
    "double",
    "float",
    "neg",
    "negative",
    "sub",
    "subtract",
    "__rsub__",
}
_SCALES = {"div", "divide", "mul", "multiply", "true_divide"}
#: Functions whose hidden states may have unlike numbers of dimensions.
_OF_ANY = {
    "torch.einsum",
    *("Tensor.reshape_as", "Tensor.view_as", "Tensor.to", "Tensor.type_as"),
}
#: Functions that copy where they must: without data it isn't known.
_SHARING = {
    *("contiguous", "double", "flatten", "float", "half", "reshape", "reshape_as", "to", "type_as"),
    *("bfloat16", "bool", "int", "long"),
}
#: Functions that are given sizes, of which the batch's is another one in a micro-batch.
_OF_SHAPES = {
    **dict.fromkeys(("reshape", "reshape_as", "unflatten", "view", "view_as"), "samples.reshape"),
    "expand": "samples.expand",
}

#: Functions of these names that are called otherwise than those of ``torch.nn.functional``.
_OTHERWISE = {"torch.adaptive_max_pool1d", "torch.instance_norm"}

#: What divides a tensor along a dimension: in an order, the pieces are parts of it.
PIECES = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("chunk", "split", "tensor_split", "unbind")
}


def _found() -> tuple[dict[Any, Function], dict[str, Function]]:
    """The functions by what is called, and by name."""
    called, named = dict[Any, Function](), dict[str, Function]()
    checks: dict[str, Check | None] = {**dict.fromkeys(ELEMENTWISE), **CHECKS}
    for place, label in ((torch, "torch"), (Tensor, "Tensor"), (F, "functional")):
        for name, check in checks.items():
            run = getattr(place, name, None)
            if not callable(run) or f"{label}.{name}" in _OTHERWISE:
                continue
            function = Function(f"{label}.{name}", run, check, of_samples=_OF_SHAPES.get(name, ""))
            called.setdefault(run, function)
            named[function.name] = function
            other = getattr(place, f"{name}_", None)
            if other is not None:
                called.setdefault(other, replace(function, is_in_place=True))
    called.setdefault(torch._C.TensorBase.pow, named["Tensor.pow"])  # of the operator
    return called, named


def _reshape_samples(hidden: Tensor, shape: Sequence[int]) -> Tensor:
    return hidden.reshape(hidden.shape[0], *shape)


def _expand_samples(hidden: Tensor, shape: Sequence[int]) -> Tensor:
    return hidden.expand(hidden.shape[0], *shape)


_CALLED, _NAMED = _found()
_OF_SAMPLES = {"samples.reshape": _reshape_samples, "samples.expand": _expand_samples}


def function_of(func: Any, kwargs: Mapping[str, Any]) -> Function | None:
    """The function that is meant by a call; None: it may not stand between two blocks."""
    function = _CALLED.get(func)
    if function is None or not kwargs.get("inplace"):
        return function
    return replace(function, is_in_place=True)


def run_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function by its name."""
    run = _OF_SAMPLES.get(name) or _NAMED[name].run
    return run(*args, **kwargs)


def pieces(func: Any, args: Any, kwargs: Any, meta_args: Any, meta_kwargs: Any) -> tuple[Any, ...]:
    """The pieces into which a function of :data:`PIECES` divides a tensor, each by another call.

    Args:
        func: The function.
        args: What it is called with.
        kwargs: The same.
        meta_args: These with tensors on the meta device.
        meta_kwargs: The same.

    Raises:
        RuntimeError: If they are parts of the batch.
    """
    with torch._C.DisableTorchFunction():
        looks = func(*meta_args, **meta_kwargs)
    tensor, *others = args
    is_each = func.__name__ == "unbind"
    place = 0 if is_each else 1
    dim = kwargs.get("dim", others[place] if len(others) > place else 0)
    if dim % meta_args[0].ndim == 0:
        raise refusal(func)
    if is_each:
        return tuple(torch.select(tensor, dim, i) for i in range(len(looks)))
    ends = list(accumulate(look.shape[dim] for look in looks))
    return tuple(
        torch.narrow(tensor, dim, end - look.shape[dim], look.shape[dim])
        for end, look in zip(ends, looks, strict=True)
    )
