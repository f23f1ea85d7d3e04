"""The world as the data is shared out in it: replicas, not stages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_gpipe.strategy.patches import DEFAULT_GROUP

_this_thread = threading.local()


@contextmanager
def world_of_replicas(replica: int, replicas: int) -> Iterator[None]:
    """Let ``torch.distributed`` count replicas as processes.

    A dataset that shares its samples out by ``get_rank()`` and ``get_world_size()`` would leave
    those of the other stages' ranks unread. Worker processes that start in here keep this view:
    forked ones by the functions, others by the environment.

    Args:
        replica: This rank's pipeline.
        replicas: D.
    """
    shown = {"RANK": str(replica), "WORLD_SIZE": str(replicas)}
    before = {name: os.environ[name] for name in shown if name in os.environ}
    default_group = DEFAULT_GROUP.current()

    def seen() -> Any:
        group = default_group()
        sees_all = getattr(_this_thread, "sees_all", False)
        return group if sees_all else _Replicas(group, replica, replicas)

    os.environ.update({name: shown[name] for name in before})
    try:
        # both functions ask it, however a dataset has imported them
        with DEFAULT_GROUP.replaced(seen):
            yield
    finally:
        os.environ.update(before)


@contextmanager
def world_as_it_is() -> Iterator[None]:
    """Let this thread see all processes, while another one reads."""
    _this_thread.sees_all = True
    try:
        yield
    finally:
        _this_thread.sees_all = False


class _Replicas:
    """The default group, but for its size and this rank's place in it."""

    def __init__(self, group: Any, replica: int, replicas: int) -> None:
        self._group = group
        self._replica = replica
        self._replicas = replicas

    def rank(self) -> int:
        return self._replica

    def size(self) -> int:
        return self._replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
