"""How large the summands of sums and means are, to tell what of these is due to rounding.

A loss may be a mean of numbers that cancel each other, as the advantages of a group do that were
normalised. What is left of them is nothing but their rounding, which no two samples share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gpipe.model.arithmetic import ADD, DIVIDE, MULTIPLY, NEGATE, SUBTRACT
from lightning_gpipe.model.ran import Ran

_REDUCTIONS = {"mean", "nanmean", "nansum", "sum"}
_SAME = {"clone", "contiguous", "detach", "double", "float", "to"} | NEGATE
#: Functions that put numbers elsewhere.
_PLACES = {"__getitem__", "cat", "flatten", "reshape", "squeeze", "stack", "unsqueeze", "view"}
#: What gives the size of the summands of two numbers.
_OF_SIZES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ADD | SUBTRACT, torch.add),
    **dict.fromkeys(MULTIPLY, torch.mul),
    **dict.fromkeys(DIVIDE, torch.div),
}


def size_of(ran: Ran, find: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """How large the summands are of what a function has made.

    Args:
        ran: The function.
        find: Gives what takes the place of a tensor, and how large its summands are, if they are
            known.

    Returns:
        A tensor of the shape of what it has made; None: they aren't larger than that, or it isn't
        known.
    """
    plain = _OF_SIZES.get(ran.name)
    is_known = plain is not None or ran.name in _SAME | _PLACES
    if ran.name not in _REDUCTIONS and not (
        is_known and any(find(tensor)[1] is not None for tensor in ran.given)
    ):
        return None

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return abs(leaf) if plain is not None and type(leaf) in (int, float) else leaf
        value, size = find(leaf)
        value = value.detach()
        return size if size is not None else value.abs() if value.is_floating_point() else value

    args, kwargs = tree_map(of, (ran.args, ran.kwargs))
    with torch.no_grad():
        if ran.name in _SAME:
            return args[0] if args else None  # in whatever type
        made = (plain or ran.function)(*args, **kwargs)
    return made if isinstance(made, Tensor) and made.is_floating_point() else None
