"""Whether a call of a function works sample by sample, by the dimensions that it works along.

Such a function gives the same for a micro-batch as for the mini-batch that it is a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch
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
Check: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], bool]

#: Functions whose other tensors have a row for each sample, too.
OF_ROWS = {"torch.cat", "torch.stack"}

#: Functions that work element by element.
ELEMENTWISE = (
    *("abs", "acos", "add", "addcdiv", "addcmul", "alpha_dropout", "asin", "atan", "atan2"),
    *("bfloat16", "bitwise_not", "bool", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip"),
    *("clone", "contiguous", "cos", "cosh", "detach", "div", "divide", "double", "dropout", "elu"),
    *("eq", "erf", "exp", "expm1", "float", "floor", "floor_divide", "fmod", "full_like", "ge"),
    *("gelu", "gt", "half", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "int"),
    *("isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "log", "log1p", "log2"),
    *("logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit"),
    *("logsigmoid", "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply"),
    *("nan_to_num", "ne", "neg", "negative", "ones_like", "pow", "rand_like", "randn_like"),
    *("reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sigmoid"),
    *("sign", "silu", "sin", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub"),
    *("subtract", "tan", "tanh", "tanhshrink", "threshold", "true_divide", "trunc", "type_as"),
    *("where", "zeros_like", "__and__", "__floordiv__", "__invert__", "__or__", "__rdiv__"),
    *("__rfloordiv__", "__rpow__", "__rsub__", "__rtruediv__", "__xor__"),
)


def listed(arguments: Sequence[Any]) -> list[Any]:
    """Arguments, and those of lists among them."""
    return [one for a in arguments for one in (a if isinstance(a, (list, tuple)) else (a,))]


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _not_first(ndim: int, dims: Any) -> bool:
    """Whether dimensions are given, and the batch's isn't among them."""
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    return bool(given) and all(type(d) is int and d % max(ndim, 1) for d in given)


def _over(place: int, name: str, default: Any = None, looks: int = 1) -> Check:
    """The check of a function that works along dimensions, but for the batch's.

    Args:
        place: Where they are among the arguments.
        name: The argument's name.
        default: What it is by default.
        looks: How many hidden states come first.
    """

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        first = listed(args[:looks])
        dims = _argument(args, kwargs, place, name, default)
        return all(isinstance(t, Look) for t in first) and _not_first(first[0].ndim, dims)

    return check


def _with_weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of a layer's function: no dimension of a weight is the batch's."""
    others = [*args[1:], *kwargs.values()]
    is_first = isinstance(args[0], Look) and args[0].ndim > 1
    return is_first and not any(isinstance(t, Look) for t in listed(others))


def _of_images(ndim: int, most: int | None = None) -> Check:
    """The check of a function of images ``[batch, channels, …]``, with so many dimensions."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return _with_weights(args, kwargs) and ndim <= args[0].ndim <= (most or ndim)

    return check


def _norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of a norm over the last dimensions."""
    shape = _argument(args, kwargs, 1, "normalized_shape")
    return _with_weights(args, kwargs) and len(shape) < args[0].ndim


def _instance_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of ``instance_norm``, whose running statistics are of the batch."""
    running = _argument(args, kwargs, 1, "running_mean")
    return _with_weights(args, kwargs) and args[0].ndim > 2 and running is None


def _padded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    pad = _argument(args, kwargs, 1, "pad")
    is_given = isinstance(pad, (list, tuple)) and all(type(p) is int for p in pad)
    return isinstance(args[0], Look) and is_given and len(pad) // 2 < args[0].ndim


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of a product of matrices: one for each sample, or the same for all."""
    other = _argument(args, kwargs, 1, "other")
    if isinstance(args[0], Look) and isinstance(other, Look):
        return args[0].ndim > 2
    return _with_weights(args, kwargs) and isinstance(other, Tensor) and other.ndim == 2


def _products(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return len(args) == 2 and all(isinstance(t, Look) and t.ndim == 3 for t in args)


def _einsum(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of ``einsum``: the batch comes first, and is summed nowhere."""
    equation, given = args[0], listed(args[1:])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return False
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    batch = output[:1]
    if not batch or output.count(batch) > 1 or len(terms) != len(given):
        return False
    return all(
        term.rfind(batch) == 0 if isinstance(t, Look) else batch not in term
        for t, term in zip(given, terms, strict=True)
    )


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of ``scaled_dot_product_attention``, whose mask is the same for all samples."""
    mask = _argument(args, kwargs, 3, "attn_mask")
    is_whole = mask is None or (isinstance(mask, Tensor) and mask.ndim < args[0].ndim)
    are_looks = len(args) > 2 and all(isinstance(t, Look) and t.ndim > 2 for t in args[:3])
    return are_looks and is_whole


def _joined(more: int) -> Check:
    """The check of ``cat`` and ``stack``, which makes more dimensions."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        parts = args[0] if isinstance(args[0], (list, tuple)) else ()
        if not parts:
            return False
        return _not_first(parts[0].ndim + more, _argument(args, kwargs, 1, "dim", 0))

    return check


def _transposed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = [_argument(args, kwargs, 1, "dim0"), _argument(args, kwargs, 2, "dim1")]
    return isinstance(args[0], Look) and _not_first(args[0].ndim, dims)


def _moved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[0], Look) and len(args) == 3 and _not_first(args[0].ndim, args[1:])


def _several(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Numbers that are given one by one, or in a list."""
    given = kwargs.get(name, args[1:])
    found: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    return found[0] if len(found) == 1 and isinstance(found[0], (list, tuple)) else found


def _permuted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dims = _several(args, kwargs, "dims")
    return isinstance(args[0], Look) and len(dims) > 0 and dims[0] == 0


def _flipped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(args[0], Look) and _not_first(args[0].ndim, _several(args, kwargs, "dims"))


def _repeated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    times = _several(args, kwargs, "repeats")
    return isinstance(args[0], Look) and len(times) == args[0].ndim and times[0] == 1


def _unsqueezed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    dim = _argument(args, kwargs, 1, "dim")
    return isinstance(args[0], Look) and _not_first(args[0].ndim + 1, dim)


def _reshaped(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of what gives each sample another shape; that the batch's stays is seen later."""
    given = listed([*args[1:], *kwargs.values()])
    is_shape = all(type(n) is int or isinstance(n, (Look, Tensor)) for n in given)
    return isinstance(args[0], Look) and bool(given) and is_shape


def _expanded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of ``expand``, which makes no dimension in front of the batch's."""
    sizes = _several(args, kwargs, "size")
    return _reshaped(args, {}) and not kwargs and len(sizes) == args[0].ndim


def _cast(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of ``to``: to another type, not to another device."""
    given = [*args[1:], *kwargs.values()]
    is_placed = any(isinstance(one, (torch.device, str)) for one in given)
    return isinstance(args[0], Look) and not is_placed


def _indexed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The check of an index, which takes all of the batch."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not isinstance(args[0], Look) or not index:
        return False
    tensors = [one for one in index if isinstance(one, (Tensor, list))]
    numbers = [one for one in index if type(one) is int]
    if len(tensors) > 1 or (tensors and (numbers or not _is_row(tensors[0]))):
        return False  # whose dimensions would come first
    if not all(type(one) in (int, slice, EllipsisType, type(None), Tensor, list) for one in index):
        return False
    if index[0] is Ellipsis:
        return sum(one is not None for one in index[1:]) < args[0].ndim
    return bool(type(index[0]) is slice and index[0] == slice(None))


def _is_row(index: Any) -> bool:
    """Whether a tensor, or a list, has one dimension."""
    return index.ndim == 1 if isinstance(index, Tensor) else all(type(i) is int for i in index)


#: Functions that work sample by sample where their arguments are such.
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("log_softmax", "softmax", "softmin", "squeeze"), _over(1, "dim")),
    **dict.fromkeys(("all", "amax", "amin", "any", "argmax", "argmin"), _over(1, "dim")),
    **dict.fromkeys(("cumprod", "cumsum", "logsumexp", "mean", "prod", "sum"), _over(1, "dim")),
    **dict.fromkeys(("narrow", "select", "std", "var"), _over(1, "dim")),
    **dict.fromkeys(("norm", "repeat_interleave"), _over(2, "dim")),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("group_norm", "linear", "prelu"), _with_weights),
    **dict.fromkeys(("tril", "triu", "interpolate"), _of_images(3, 9)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _of_images(4)),
    **dict.fromkeys(("movedim", "moveaxis", "swapaxes", "swapdims"), _moved),
    **dict.fromkeys(("reshape", "reshape_as", "unflatten", "view", "view_as"), _reshaped),
    **{
        name.format(n): _of_images(n + 2)
        for n in (1, 2, 3)
        for name in ("avg_pool{}d", "adaptive_avg_pool{}d", "max_pool{}d", "adaptive_max_pool{}d")
    },
    **{f"conv{n}d": _of_images(n + 2) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _of_images(n + 2) for n in (1, 2, 3)},
    **{f"dropout{n}d": _of_images(n + 2) for n in (1, 2, 3)},
    "__getitem__": _indexed,
    "bmm": _products,
    "cat": _joined(0),
    "cosine_similarity": _over(2, "dim", 1, looks=2),
    "einsum": _einsum,
    "expand": _expanded,
    "flatten": _over(1, "start_dim", 0),
    "flip": _flipped,
    "glu": _over(1, "dim", -1),
    "instance_norm": _instance_norm,
    "matmul": _product,
    "normalize": _over(2, "dim", 1),
    "pad": _padded,
    "permute": _permuted,
    "repeat": _repeated,
    "roll": _over(2, "dims"),
    "scaled_dot_product_attention": _attention,
    "stack": _joined(1),
    "to": _cast,
    "transpose": _transposed,
    "unsqueeze": _unsqueezed,
}
