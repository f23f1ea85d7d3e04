"""Counts the hooks on tensors with a graph and on what graphs save, and gradients kept there.

A backward that is split would run them twice, and add gradients twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")
_count = 0


def count() -> int:
    """How many there have been, while :func:`counted` stands in place of PyTorch's."""
    return _count


def counted_entry(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    """What ``torch.autograd.graph.saved_tensors_hooks`` does when it begins, counted.

    Args:
        enter: PyTorch's.
    """

    @wraps(enter)
    def counting(hooks: Any) -> None:
        global _count
        _count += 1
        enter(hooks)

    return counting


def counted(register: Callable[..., Result]) -> Callable[..., Result]:
    """``Tensor.register_hook`` or ``Tensor.retain_grad``, counted.

    Args:
        register: PyTorch's.
    """

    @wraps(register)
    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Result:
        global _count
        _count += tensor.grad_fn is not None
        return register(tensor, *args, **kwargs)

    return counting
