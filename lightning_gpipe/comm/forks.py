"""Connections that belong to this process alone, not to the children it forks."""

from __future__ import annotations

import os
from typing import Any

_connections: set[Any] = set()


def keep_from_children(connection: Any) -> None:
    """Let forked children, such as a loader's workers, not keep a connection open.

    Else a killed process would seem to live as long as its children.

    Args:
        connection: A socket.
    """
    _connections.difference_update([c for c in list(_connections) if c.fileno() < 0])
    _connections.add(connection)


def _drop_connections() -> None:
    # not closed: the child's copies of the objects would close the number once more
    nothing = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        if connection.fileno() >= 0:
            os.dup2(nothing, connection.fileno())
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_connections)
