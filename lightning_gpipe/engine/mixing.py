"""Finds operations of a loss that compute with several samples together.

It looks at the loss's graph, from where samples come in. Whether a dimension is that of the
samples is told by its length alone, so what is found may be something else now and then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.tensors.graph import next_of, nodes_of

#: Operations along one dimension, or over all elements, that look at them together.
_ALONG = (
    *("Cummax", "Cummin", "Cumprod", "Cumsum", "Kthvalue", "LogSoftmax", "Logcumsumexp", "Median"),
    *("Softmax", "Sort", "StdBackward", "StdMean", "Topk", "VarBackward", "VarMean"),
)
#: Operations that are linear in one argument, or move elements.
_LINEAR = (
    *("Add", "AsStrided", "Cat", "Clone", "CopyBackwards", "CopySlices", "Div", "Dot", "Expand"),
    *("Index", "Mean", "Mm", "Mul", "Mv", "Neg", "Permute", "Repeat", "Rsub", "Select", "Slice"),
    *("Split", "Squeeze", "Stack", "Sub", "Sum", "TBackward", "ToCopy", "Transpose", "Unbind"),
    *("UnsafeView", "Unsqueeze", "View"),
)
#: Operations that show elements in another way.
_MOVES = (
    *("Clone", "Expand", "Permute", "Reshape", "Squeeze", "TBackward", "ToCopy", "Transpose"),
    *("UnsafeView", "Unsqueeze", "View"),
)


def mixing(samples: int, of_samples: Collection[Any], of_scalars: Collection[Any]) -> str:
    """The name of an operation that computes with several samples together; else nothing.

    Args:
        samples: How many there are.
        of_samples: The loss's nodes that compute with samples.
        of_scalars: Those of which nothing is by sample.
    """
    users = dict[Any, list[Any]]()
    for node in of_samples:
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    for node in of_samples:
        if node in of_scalars:
            continue
        found = ""
        if _pairs(node, samples):
            found = "matmul" if "mm" in name_of(node) else name_of(node)
        elif _compares(node, samples) or _works_along(node, samples):
            found = name_of(node)
        elif _is_mean(node, samples):
            found = _bent(node, of_samples, users)
        if found and not is_of_one_sample(node, of_samples):
            return found
    return ""


def name_of(node: Any) -> str:
    """What a node's operation is called."""
    return str(node.name().partition("Backward")[0].lower())


def _pairs(node: Any, samples: int) -> bool:
    """Whether an operation is one of each sample with each, or sums products of samples up."""
    name = node.name()
    if name.startswith(("Add", "Div", "Mul", "Rsub", "Sub")):  # rows [1, N, ...] and columns
        sides = [_made(given)[:2] for given, _ in node.next_functions]
        return [samples, 1] in sides and [1, samples] in sides and not _weighs(node)
    left, right = shape_of(node, "self"), shape_of(node, "mat2")
    is_product = name.startswith(("MmBackward", "BmmBackward")) and left and right
    if not is_product or math.prod(left[:-2]) > 1 or _weighs(node):
        return False
    is_of_pairs = left[-2] % samples == 0 and left[-2] == right[-1]
    return is_of_pairs or left[-1] == samples


def _weighs(node: Any) -> bool:
    """Whether an operation takes a parameter, as it is, in another view, or normalised."""

    def before(given: Any) -> list[Any]:
        moves = given.name().startswith((*_MOVES, "Div", "Mul", "WeightNorm"))
        return next_of(given) if moves else []

    return any(hasattr(given, "variable") for given in nodes_of(next_of(node), before))


def _compares(node: Any, samples: int) -> bool:
    """Whether an operation puts samples beside others, or measures their distances."""
    name = node.name()
    if name.startswith(("RollBackward", "FlipBackward")):  # 0 dimensions roll all as one
        return not node._saved_dims or 0 in _signed(node._saved_dims)
    if name.startswith(("CdistBackward", "EuclideanDistBackward")):
        left, right = shape_of(node, "x1"), shape_of(node, "x2")
        return len(left) == len(right) == 2 and left[0] == right[0] and left[0] % samples == 0
    return bool(name.startswith("PdistBackward"))


def _works_along(node: Any, samples: int) -> bool:
    """Whether an operation looks at samples together, or takes some of them."""
    name, shape = node.name(), shape_of(node) or _made(node)
    if len(shape) == 1 and samples > 1 and shape[0] % samples == 0 and name.startswith(_ALONG):
        return True  # along the elements of all samples, which stand in one row
    if not _is_by_sample(shape, samples) or not _is_along_first(node, len(shape)):
        return False
    if name.startswith("SplitBackward"):
        return 1 < int(node._saved_split_size) < samples
    if name.startswith("SplitWithSizes"):
        return len(node._saved_split_sizes) < samples
    if name.startswith("SliceBackward"):
        return 1 < _made(node)[0] < samples
    return bool(name.startswith(_ALONG))


def _is_mean(node: Any, samples: int) -> bool:
    """Whether an operation takes means or sums over samples, several of them."""
    shape = shape_of(node)
    return (
        node.name().startswith(("MeanBackward1", "SumBackward1"))
        and math.prod(_made(node)) > 1
        and _is_by_sample(shape, samples)
        and _is_along_first(node, len(shape))
    )


def _bent(node: Any, of_samples: Collection[Any], users: Mapping[Any, Sequence[Any]]) -> str:
    """The name of an operation that isn't linear in what a node makes; else nothing.

    Args:
        node: The node.
        of_samples: The nodes that compute with samples.
        users: For each node those that use what it makes.
    """
    left, seen = [*users.get(node, ())], {node}
    while left:
        user = left.pop()
        if user in seen:
            continue
        seen.add(user)
        name, theirs = user.name(), [given in of_samples for given, _ in user.next_functions]
        is_product = name.startswith(("Dot", "Mm", "Mul", "Mv")) and sum(theirs) > 1
        is_quotient = name.startswith("Div") and len(theirs) == 2 and theirs[1]
        if is_product or is_quotient or not name.startswith(_LINEAR):
            return name_of(user)
        left += users.get(user, ())
    return ""


def _is_by_sample(shape: Sequence[int], samples: int) -> bool:
    """Whether the first dimension alone is as long as there are samples."""
    return samples > 1 and [*shape[:1]] == [samples] and [*shape[1:2]] != [samples]


def _is_along_first(node: Any, dims: int) -> bool:
    """Whether an operation works along the first dimension."""
    dim = getattr(node, "_saved_dim", None)
    along = [dim] if isinstance(dim, int) else dim
    return not along or any(d % dims == 0 for d in _signed(along))


def is_of_one_sample(node: Any, of_samples: Collection[Any]) -> bool:
    """Whether a node computes with one sample's row, as in a loop over the samples."""
    nodes = nodes_of([node], lambda n: [given for given in next_of(n) if given in of_samples])
    return any(_takes_one(n) for n in nodes)


def _takes_one(node: Any) -> bool:
    """Whether an operation takes one row."""
    name = node.name()
    if name.startswith(("SliceBackward", "SplitBackward")):
        return node._saved_dim == 0 and _made(node)[:1] == [1]
    return name.startswith(("Select", "Unbind")) and bool(node._saved_dim == 0)


def sums_samples(node: Any, samples: int) -> bool:
    """Whether the first dimension of what is summed up, or reduced, seems to be the samples'."""
    shape = shape_of(node) or shape_of(node, "tensor")  # the other factor of a product
    dims = getattr(node, "_saved_dim", None)
    dims = [dims] if isinstance(dims, int) else dims
    sums_first = not dims or any(d % max(len(shape), 1) == 0 for d in _signed(dims))
    if samples < 2 or not shape or not sums_first:
        return False
    # samples by tokens, and no square of features
    is_flat = len(shape) > 1 and shape[0] % samples == 0 and shape[0] != shape[1]
    return bool(is_flat or shape[0] == samples)


def shape_of(node: Any, name: str = "self") -> list[int]:
    """The shape of an operation's input, as far as its node keeps it."""
    sizes = getattr(node, f"_saved_{name}_sym_sizes", None)
    if sizes is not None:
        return [*sizes]
    try:
        kept = getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # it was changed in place since, or isn't kept any more
        return []
    return [*kept.shape] if isinstance(kept, Tensor) else []


def _made(node: Any) -> list[int]:
    """The shape of what an operation makes."""
    try:
        return [*node._input_metadata[0].shape] if node is not None else []
    except (AttributeError, IndexError, RuntimeError):  # a nested tensor has no shape
        return []


def _signed(dims: Sequence[int]) -> list[int]:
    return [d - 2**64 if d >= 2**63 else d for d in dims]
