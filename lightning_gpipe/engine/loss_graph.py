"""The graph of a loss."""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor

from lightning_gpipe.tensors.graph import nodes_of


def made_of(leaf: Tensor, node: Any) -> set[Any]:
    """Those of a loss's nodes that compute with a leaf.

    Args:
        leaf: The leaf.
        node: The loss's.
    """
    users, seen, left, found = dict[Any, list[Any]](), {node}, [node], list[Any]()
    while left:
        node = left.pop()
        if getattr(node, "variable", None) is leaf:
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                users.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    left.append(following)
    theirs = {*found}
    while found:
        fresh = {user for user in users.get(found.pop(), ()) if user not in theirs}
        theirs |= fresh
        found += fresh
    return theirs


def look_of(node: Any) -> int:
    """What tells a graph from others: the kinds of its nodes, in order."""
    look = 0
    for each in nodes_of([node]):
        look = zlib.crc32(type(each).__name__.encode(), look)
    return look
