"""What the nodes of a loss's graph tell of shapes.

Whether a dimension is that of the samples is told by its length alone, so what is found may be
something else now and then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.tensors.graph import next_of, nodes_of


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
