"""A copy of the module that a callback keeps, such as an average of its weights.

Each stage keeps of the copy what it holds of the module itself, so that the callback, which walks
through both side by side, works on every stage as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_gpipe.comm.groups import Links
from lightning_gpipe.model.parameters import materialize, to_meta
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.state.placement import Skeleton, share_outside, share_over_replicas


class Shadow:
    """One rank's part of a copy of the module. Collective over all ranks.

    Args:
        module: The copy, or a module around it. It stays on the device where it is.
        backbone: Dotted name of the copy's backbone in it.
        links: The process groups.
        can_gather: Tells whether the other stages can be waited for.
    """

    def __init__(
        self, module: nn.Module, backbone: str, links: Links, can_gather: Callable[[], bool]
    ) -> None:
        self._module, self._backbone, self._links = module, backbone, links
        self._can_gather = can_gather
        self._skeleton: Skeleton | None = None
        first = next(module.parameters(), None)
        self._device = torch.device("cpu") if first is None or first.is_meta else first.device
        share_outside(module, module.get_submodule(backbone), links, self._device)
        self._empty = materialize(module.get_submodule(backbone))

    def cut(self, partition: Partition) -> None:
        """Keep this stage's part, with the first stage's values."""
        skeleton = Skeleton(
            self._module, self._backbone, partition, self._links.control, self._device
        )
        skeleton.cut()
        share_over_replicas([*skeleton.own, *skeleton.shared], self._links)
        self._skeleton = skeleton
        self._module.__dict__.update(state_dict=self._state_dict, to=self._to)

    def close(self, restore: bool) -> None:
        """Give the copy back, whole if it is to be restored."""
        for name in ("state_dict", "to"):
            self._module.__dict__.pop(name, None)
        if self._skeleton is not None and restore:
            self._skeleton.restore()
        if self._skeleton is None or restore:
            to_meta(self._empty)

    def _state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The whole copy's on the first rank, for a checkpoint."""
        state: dict[str, Any] = type(self._module).state_dict(self._module, *args, **kwargs)
        if self._skeleton is None or self._links.replica or not self._can_gather():
            return state
        return self._skeleton.gather(state)

    def _to(self, device: torch.device | str) -> nn.Module:
        """Move what this stage holds."""
        if self._skeleton is not None:
            for slot in self._skeleton.slots:
                slot.to(torch.device(device))
        return self._module
