"""Counts hooks: those on tensors with a graph, and changes of any.

A backward that is split, or a second one, would run the former twice, or add gradients twice that
tensors keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

Result = TypeVar("Result")
_count = _removals = 0


def count() -> int:
    """How many there have been, while :func:`counted` stands in place of PyTorch's."""
    return _count


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


def all_changes() -> tuple[int, int]:
    """Changes when any hook comes or, while :func:`noting_removal` stands there, goes."""
    return RemovableHandle.next_id, _removals


def noting_removal(remove: Callable[[RemovableHandle], None]) -> Callable[[RemovableHandle], None]:
    """``RemovableHandle.remove``, counted.

    Args:
        remove: PyTorch's.
    """

    @wraps(remove)
    def removing(handle: RemovableHandle) -> None:
        global _removals
        _removals += 1
        remove(handle)

    return removing
