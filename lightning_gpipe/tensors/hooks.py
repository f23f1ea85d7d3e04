"""Counts the hooks on tensors with a graph, which a backward that is split would run twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_count = 0


def count() -> int:
    """How many there have been, while :func:`counted` stands in place of PyTorch's."""
    return _count


def counted(register_hook: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
    """``Tensor.register_hook``, counted.

    Args:
        register_hook: PyTorch's.
    """

    @wraps(register_hook)
    def register(tensor: Tensor, *args: Any, **kwargs: Any) -> RemovableHandle:
        global _count
        _count += tensor.grad_fn is not None
        return register_hook(tensor, *args, **kwargs)

    return register
