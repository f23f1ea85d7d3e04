"""The graphs that autograd makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of a graph, each once, in an order that graphs of the same shape share.

    Args:
        roots: Where it begins.
    """
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
