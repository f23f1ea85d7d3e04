"""Finds samples that are computed together, by derivatives.

The gradient of a mean over samples in a sample's values doesn't depend on another's values. So the
second derivative of a loss is zero there, for whatever operations it is made of; if it isn't, the
samples are coupled. What is piecewise linear, such as a sort, shows nothing: :mod:`.mixing` knows
some of it. Where no loss is at hand yet, a sample's values may not depend on another's at all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad  # not what stands in its place while a model trains
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from lightning_gpipe.engine.autograd import ExitNode
from lightning_gpipe.tensors.graph import next_of

#: Elements of a graph up to which it is differentiated twice: that takes a few times their memory.
_MOST = 2**22
_ROUNDING = 1e-6  # of the largest derivative


def couples_samples(loss: Tensor, samples: int, of_samples: Collection[Any]) -> bool:
    """Whether the second derivative of a loss couples samples.

    Args:
        loss: The loss; its graph is kept.
        samples: How many there are.
        of_samples: The loss's nodes that compute with samples.

    Returns:
        False, too, where it isn't known: large graphs, functions that are written in Python or that
        can't be differentiated twice, and outputs whose first dimension isn't that of the samples.
    """
    between = _between(of_samples)

    def depends() -> bool:
        if sum(math.prod(made.shape) for node in between for made in node._input_metadata) > _MOST:
            return False
        edges = _edges(of_samples, between, samples)
        with torch.enable_grad():
            found = grad(loss, edges, torch.ones_like(loss), create_graph=True) if edges else ()
        gradients = [g for g in found if g is not None and g.requires_grad]
        return _depend(gradients, edges, samples)

    return samples > 1 and _tried(between, depends)


def mixes_samples(made: Sequence[Tensor], samples: int, of_samples: Collection[Any]) -> bool:
    """Whether samples are computed together.

    Args:
        made: What is made of them, ``[samples, ...]``; its graph is kept.
        samples: How many there are.
        of_samples: The nodes of its graph that compute with samples.

    Returns:
        False, too, where it isn't known; see :func:`couples_samples`.
    """
    between = _between(of_samples)
    rows = [t for t in made if t.grad_fn in of_samples and t.shape and len(t) % samples == 0]

    def depends() -> bool:
        return _depend(rows, _edges(of_samples, between, samples), samples)

    return samples > 1 and _tried(between, depends)


def _between(of_samples: Collection[Any]) -> set[Any]:
    """The operations in front of the backbone's output."""
    return {node for node in of_samples if not _is_exit(node) and not hasattr(node, "variable")}


def _is_exit(node: Any) -> bool:
    return isinstance(node, ExitNode._backward_cls)


def _edges(of_samples: Collection[Any], between: set[Any], samples: int) -> list[GradientEdge]:
    """Where each sample has rows of its own first: as the backbone's output, or from data.

    Raises:
        RuntimeError: If an output of the backbone hasn't.
    """
    inner = {node for node in of_samples if not hasattr(node, "variable")}
    first = {node for node in inner if inner.isdisjoint(next_of(node))}
    found = []
    for node, i in {edge for user in between for edge in user.next_functions if edge[0] in first}:
        shape = node._input_metadata[i].shape
        if shape and shape[0] % samples == 0:
            found.append(GradientEdge(node, i))
        elif _is_exit(node):
            raise RuntimeError("An output of the backbone has no rows by samples.")
    return found


def _tried(between: Collection[Any], depends: Callable[[], bool]) -> bool:
    """Whether something depends on something, where graphs may be run for that."""
    if any(isinstance(node, BackwardCFunction) for node in between):
        return False  # these may do more than compute
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return depends()
    except RuntimeError:  # an operation that has no such derivative
        return False


def _depend(made: Sequence[Tensor], edges: Sequence[GradientEdge], samples: int) -> bool:
    """Whether rows that are made depend on rows of other samples."""
    for bit in range((samples - 1).bit_length() if made and edges else 0):  # any two differ in one
        along = [_numbers(each, samples, bit) for each in made]
        found = grad(made, edges, along, retain_graph=True, allow_unused=True)
        largest, mixed = 0.0, 0.0
        for each in found:
            if each is not None:
                largest = max(largest, float(each.abs().max()))
                mixed = max(mixed, float((each * ~_has(each, samples, bit)).abs().max()))
        if mixed > _ROUNDING * largest:
            return True
    return False


def _has(like: Tensor, samples: int, bit: int) -> Tensor:
    """Which elements are of a sample whose number has a bit."""
    rows = torch.arange(len(like), device=like.device) // (len(like) // samples)
    return (rows >> bit & 1).bool().view(-1, *[1] * (like.dim() - 1))


def _numbers(like: Tensor, samples: int, bit: int) -> Tensor:
    """Any numbers for the samples whose number has a bit, zeros for the others."""
    numbers = torch.arange(like.numel(), device=like.device, dtype=torch.float64).cos()
    return numbers.view(like.shape).to(like.dtype) * _has(like, samples, bit)
