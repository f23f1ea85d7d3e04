"""What is noted of a function that a step has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Ran(NamedTuple):
    """A function that a step has run.

    Args:
        function: The function.
        name: Its name.
        args: What it was given.
        kwargs: The same.
        given: The tensors among these.
        result: What it has made.
        made: The tensors in it.
        is_free: Whether it does nothing else: changes no tensor, draws no random number.
    """

    function: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Sequence[Tensor]
    result: Any
    made: Sequence[Tensor]
    is_free: bool
