"""The world as the data is shared out in it: replicas, not stages."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.strategy import advice
from lightning_gpipe.strategy.patches import DATALOADER, DEFAULT_GROUP

#: Where PyTorch's functions stand, and what logs their calls.
_DISTRIBUTED, _LOGGER = "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"
#: What combines the values of all processes.
_COLLECTIVES = "all_", "_all_gather", "reduce", "_reduce", "gather"
_this_thread = threading.local()


@contextmanager
def world_of_replicas(replica: int, replicas: int) -> Iterator[None]:
    """Let ``get_rank()`` and ``get_world_size()`` count replicas as processes.

    A dataset that shares its samples out by ``get_rank()`` and ``get_world_size()`` would leave
    those of the other stages' ranks unread. Collective calls see all processes. Worker processes
    that start in here keep this view: forked ones by the functions, others by the environment.

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
        is_asked = not sees_all and _asked()[0] in ("get_rank", "get_world_size")
        return _Replicas(group, replica, replicas) if is_asked else group

    os.environ.update({name: shown[name] for name in before})
    try:
        # both functions ask it, however a dataset has imported them
        with DEFAULT_GROUP.replaced(seen):
            yield
    finally:
        os.environ.update(before)


@contextmanager
def hooks_see_replicas(groups: Groups) -> Iterator[None]:
    """The same for the hooks that make loaders: what they share out by rank is read by replicas.

    Args:
        groups: The process groups.
    """
    dataloader = DATALOADER.current()

    def seeing_replicas(*args: Any) -> Any:
        with world_of_replicas(groups.replica, groups.replicas):
            return dataloader(*args)

    with DATALOADER.replaced(seeing_replicas) if groups.stages > 1 else nullcontext():
        yield


@contextmanager
def size_told_of(stages: int, replicas: int) -> Iterator[None]:
    """Warn, once, where a module or DataModule asks PyTorch for the number of processes.

    And once where it sums, or gathers, over all of them. Not where replicas count as processes.

    Args:
        stages: K.
        replicas: D.
    """
    default_group, told = DEFAULT_GROUP.current(), set[str]()

    def noticed() -> Any:
        name, caller = _asked()
        what = "size" if name == "get_world_size" else "collective"
        is_one = what == "size" or name.startswith(_COLLECTIVES)
        if is_one and what not in told and advice.is_called_by_user(caller):
            told.add(what)
            if what == "size":
                size = "torch.distributed.get_world_size()"
                advice.warn_of_world_size(size, stages * replicas, stages, replicas)
            else:
                advice.warn_of_collective(name, stages, replicas)
        return default_group()

    with DEFAULT_GROUP.replaced(noticed) if stages > 1 else nullcontext():
        yield


@contextmanager
def world_as_it_is() -> Iterator[None]:
    """Let this thread see all processes, while another one reads."""
    _this_thread.sees_all = True
    try:
        yield
    finally:
        _this_thread.sees_all = False


def _asked() -> tuple[str, FrameType | None]:
    """The function of PyTorch's that needs the default group, and who has called it."""
    frame, name = sys._getframe(2), ""
    while (module := frame.f_globals.get("__name__")) in (_DISTRIBUTED, _LOGGER):
        name = frame.f_code.co_name if module == _DISTRIBUTED else name
        if frame.f_back is None:
            return name, None
        frame = frame.f_back
    return name, frame


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
