"""The graphs that autograd makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def next_of(node: Any) -> list[Any]:
    """The nodes to which a node leads."""
    return [following for following, _ in node.next_functions if following is not None]


def nodes_of(
    roots: Iterable[Any], following: Callable[[Any], Iterable[Any]] = next_of
) -> Iterator[Any]:
    """The nodes of a graph, each once, in an order that graphs of the same shape share.

    Args:
        roots: Where it begins.
        following: Those that are looked at behind one.
    """
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for one in following(node):
            if one not in seen:
                seen.add(one)
                waiting.append(one)
