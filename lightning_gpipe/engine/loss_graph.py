"""The graph of a loss."""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor

from lightning_gpipe.tensors.graph import next_of, nodes_of


def made_of(leaf: Tensor, node: Any) -> set[Any]:
    """Those of a loss's nodes that compute with a leaf.

    Args:
        leaf: The leaf.
        node: The loss's.
    """
    users, found = dict[Any, list[Any]](), list[Any]()
    for each in nodes_of([node]):
        if getattr(each, "variable", None) is leaf:
            found.append(each)
        for following in next_of(each):
            users.setdefault(following, []).append(each)
    return {*nodes_of(found, lambda used: users.get(used, ()))}


def look_of(node: Any) -> int:
    """What tells a graph from others: the kinds of its nodes, in order."""
    look = 0
    for each in nodes_of([node]):
        look = zlib.crc32(type(each).__name__.encode(), look)
    return look
