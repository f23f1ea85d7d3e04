"""Finds losses that compute with several samples together, by their second derivatives.

The gradient of a mean over samples in a sample's output doesn't depend on another's output. So the
second derivative is zero there, for whatever operations it is made of; if it isn't, the samples are
coupled. What is piecewise linear, such as a sort, shows nothing: :mod:`.mixing` knows some of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad  # not what stands in its place while a model trains
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from lightning_gpipe.engine.autograd import ExitNode

#: Elements of a graph up to which it is differentiated twice: that takes a few times their memory.
_MOST = 2**22
_ROUNDING = 1e-6  # of the largest second derivative


def couples_samples(loss: Tensor, samples: int, of_output: Collection[Any]) -> bool:
    """Whether the second derivative of a loss couples samples.

    Args:
        loss: The loss; its graph is kept.
        samples: How many there are.
        of_output: The loss's nodes that compute with the backbone's output.

    Returns:
        False, too, where it isn't known: large graphs, functions that are written in Python or that
        can't be differentiated twice, and outputs whose first dimension isn't that of the samples.
    """
    exits = [node for node in of_output if isinstance(node, ExitNode._backward_cls)]
    between = [node for node in of_output if node not in exits]
    if samples < 2 or any(isinstance(node, BackwardCFunction) for node in between):
        return False  # these may do more than compute
    try:
        edges = {edge for node in between for edge in node.next_functions if edge[0] in exits}
        shapes = [node._input_metadata[i].shape for node, i in edges]
        elements = sum(math.prod(made.shape) for node in between for made in node._input_metadata)
        if elements > _MOST or any(not s or s[0] % samples for s in shapes) or not edges:
            return False
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return _couples(loss, samples, [GradientEdge(*edge) for edge in edges])
    except RuntimeError:  # an operation that has no second derivative
        return False


def _couples(loss: Tensor, samples: int, edges: list[GradientEdge]) -> bool:
    gradients = [
        gradient
        for gradient in grad(loss, edges, torch.ones_like(loss), create_graph=True)
        if gradient is not None and gradient.requires_grad
    ]
    for bit in range((samples - 1).bit_length() if gradients else 0):  # any two differ in one
        along = [_numbers(gradient, samples, bit) for gradient in gradients]
        seconds = grad(gradients, edges, along, retain_graph=True, allow_unused=True)
        largest, coupled = 0.0, 0.0
        for second in seconds:
            if second is not None:
                largest = max(largest, float(second.abs().max()))
                coupled = max(coupled, float((second * ~_has(second, samples, bit)).abs().max()))
        if coupled > _ROUNDING * largest:
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
