"""What a model's loop may do with hidden states between two blocks: what works sample by sample.

Such a function gives the same for a micro-batch as for the mini-batch that it is a part of, so it
can run with the block that comes next, on the block's stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor


class Look:
    """Stands for a hidden state in the arguments of a function.

    Args:
        ndim: The number of its dimensions, ``[batch, …]``.
    """

    __slots__ = ("ndim",)

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


#: Whether a call works sample by sample: its positional and its other arguments.
_Check: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], bool]

_ELEMENTWISE = (
    *("abs", "add", "addcdiv", "addcmul", "alpha_dropout", "atan", "ceil", "celu", "clamp"),
    *("clamp_max", "clamp_min", "clip", "clone", "cos", "div", "divide", "dropout", "elu", "eq"),
    *("erf", "exp", "expm1", "floor", "ge", "gelu", "gt", "hardshrink", "hardsigmoid", "hardswish"),
    *("hardtanh", "le", "logical_not", "lt", "ne"),
    *("leaky_relu", "lerp", "log", "log1p", "log2", "logsigmoid", "masked_fill", "maximum"),
    *("minimum", "mish", "mul", "multiply", "nan_to_num", "neg", "negative", "pow", "reciprocal"),
    *("relu", "relu6", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin"),
    *("softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tanh"),
    *("tanhshrink", "threshold", "true_divide", "where", "__rsub__", "__rdiv__", "__rpow__"),
    *("__rtruediv__", "ones_like", "zeros_like"),
)
#: Functions whose other tensors have a row for each sample, too.
_OF_ROWS = {"torch.cat", "torch.stack"}


@dataclass(frozen=True, slots=True)
class Function:
    """One that may stand between two blocks.

    Args:
        name: How a program calls it.
        run: The function.
        check: Whether a call works sample by sample; None: element by element.
        is_in_place: Whether the one that was called changes its first argument; this doesn't.
    """

    name: str
    run: Callable[..., Any]
    check: _Check | None
    is_in_place: bool = False

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int] | None:
        """Look whether a call works sample by sample.

        Args:
            args: What it is called with: hidden states, other tensors, and constants.
            kwargs: The same.

        Returns:
            The ``id`` of each tensor that is the same for all samples; None: it doesn't.
        """
        given = _listed((*args, *kwargs.values()))
        hidden = [t for t in given if isinstance(t, Look)]
        others = [t for t in given if isinstance(t, Tensor)]
        ndim = hidden[0].ndim
        if kwargs.get("out") is not None or any(t.ndim != ndim for t in hidden):
            return None
        if self.check is not None and not (args and self.check(args, kwargs)):
            return None
        if self.name in _OF_ROWS:
            return set() if all(t.ndim == ndim for t in others) else None
        if self.check is not None:
            return {id(t) for t in others}
        if any(t.ndim > ndim for t in others):
            return None
        return {id(t) for t in others if t.ndim < ndim}


def _listed(arguments: Sequence[Any]) -> list[Any]:
    """Arguments, and those of lists among them."""
    return [one for a in arguments for one in (a if isinstance(a, (list, tuple)) else (a,))]


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _not_first(ndim: int, dims: Any) -> bool:
    """Whether dimensions are given, and the batch's isn't among them."""
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return bool(listed) and all(type(d) is int and d % max(ndim, 1) for d in listed)


def _over(place: int, name: str, default: Any = None) -> _Check:
    """The check of a function that works along dimensions, but for the batch's."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        first = _listed(args[:1])[0]
        dims = _argument(args, kwargs, place, name, default)
        return isinstance(first, Look) and _not_first(first.ndim, dims)

    return check


def _with_weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of a layer's function: no dimension of a weight is the batch's."""
    others = [*args[1:], *kwargs.values()]
    is_first = bool(args) and isinstance(args[0], Look) and args[0].ndim > 1
    return is_first and not any(isinstance(t, Look) for t in others)


def _norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of a norm over the last dimensions."""
    shape = _argument(args, kwargs, 1, "normalized_shape")
    return _with_weights(args, kwargs) and len(shape) < args[0].ndim


def _by_matrix(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    other = _argument(args, kwargs, 1, "other")
    return _with_weights(args, kwargs) and isinstance(other, Tensor) and other.ndim == 2


def _joined(more: int) -> _Check:
    """The check of ``cat`` and ``stack``, which makes more dimensions."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        parts = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if not parts:
            return False
        return _not_first(parts[0].ndim + more, _argument(args, kwargs, 1, "dim", 0))

    return check


def _transposed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = [_argument(args, kwargs, 1, "dim0"), _argument(args, kwargs, 2, "dim1")]
    return isinstance(args[0], Look) and _not_first(args[0].ndim, dims)


def _permuted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    listed = kwargs.get("dims", args[1:])
    dims = listed[0] if len(listed) == 1 and isinstance(listed[0], (list, tuple)) else listed
    return isinstance(args[0], Look) and len(dims) > 0 and dims[0] == 0


def _flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    start = _argument(args, kwargs, 1, "start_dim", 0)
    return isinstance(args[0], Look) and _not_first(args[0].ndim, start)


def _unsqueezed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dim = _argument(args, kwargs, 1, "dim")
    return isinstance(args[0], Look) and _not_first(args[0].ndim + 1, dim)


_CHECKS: dict[str, _Check] = {
    "cat": _joined(0),
    "flatten": _flattened,
    "glu": _over(1, "dim", -1),
    "group_norm": _with_weights,
    "layer_norm": _norm,
    "linear": _with_weights,
    "log_softmax": _over(1, "dim"),
    "matmul": _by_matrix,
    "mean": _over(1, "dim"),
    "normalize": _over(2, "dim", 1),
    "permute": _permuted,
    "rms_norm": _norm,
    "softmax": _over(1, "dim"),
    "stack": _joined(1),
    "sum": _over(1, "dim"),
    "transpose": _transposed,
    "unsqueeze": _unsqueezed,
}


def _found() -> tuple[dict[Any, Function], dict[str, Function]]:
    """The functions by what is called, and by name."""
    called, named = dict[Any, Function](), dict[str, Function]()
    checks: dict[str, _Check | None] = {**dict.fromkeys(_ELEMENTWISE), **_CHECKS}
    for place, label in ((torch, "torch"), (Tensor, "Tensor"), (F, "functional")):
        for name, check in checks.items():
            run = getattr(place, name, None)
            if run is None:
                continue
            function = Function(f"{label}.{name}", run, check)
            called.setdefault(run, function)
            named[function.name] = function
            other = getattr(place, f"{name}_", None)
            if other is not None:
                called.setdefault(other, Function(function.name, run, check, is_in_place=True))
    called.setdefault(torch._C.TensorBase.pow, named["Tensor.pow"])  # of the operator
    return called, named


_CALLED, _NAMED = _found()


def function_of(func: Any, kwargs: Mapping[str, Any]) -> Function | None:
    """The function that is meant by a call; None: it may not stand between two blocks."""
    function = _CALLED.get(func)
    if function is None or not kwargs.get("inplace"):
        return function
    return Function(function.name, function.run, function.check, is_in_place=True)


def run_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function by its name."""
    return _NAMED[name].run(*args, **kwargs)
