"""A copy of the module that a callback keeps, such as an average of its weights.

Each stage keeps of the copy what it holds of the module itself, so that the callback, which walks
through both side by side, works on every stage as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.parameters import materialize, to_meta
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.redirect import Redirect
from lightning_gpipe.state.gather import StageTensors, share_outside, share_over_replicas
from lightning_gpipe.state.placement import Owners, Placement


class AveragedCopy:
    """One rank's part of a copy of the module. Collective over all ranks.

    Args:
        module: The copy, or a module around it. It stays on the device where it is.
        backbone: Dotted name of the copy's backbone in it.
        groups: The process groups.
        gathers: Tells whether the first rank's state dict is to be whole, and can be.
    """

    def __init__(
        self, module: nn.Module, backbone: str, groups: Groups, gathers: Callable[[], bool]
    ) -> None:
        self._module, self._backbone, self._groups = module, backbone, groups
        self._gathers = gathers
        self._tensors: StageTensors | None = None
        first = next(module.parameters(), None)
        self._device = torch.device("cpu") if first is None or first.is_meta else first.device
        share_outside(module, module.get_submodule(backbone), groups, self._device)
        self._empty = materialize(module.get_submodule(backbone))

    def cut(self, partition: Partition) -> None:
        """Keep this stage's part, with the first stage's values."""
        groups = self._groups
        placement = Placement.of(self._module, self._backbone, partition, groups.stage)
        self._tensors = StageTensors(placement, groups.pipeline, self._device)
        self._tensors.cut()
        share_over_replicas([*placement.own, *placement.shared], groups)
        for name, target in (("state_dict", self._state_dict), ("to", self._to)):
            self._module.__dict__[name] = Redirect(self._module, None, target, name)

    def settle(self, owners: Owners, backbone: str) -> None:
        """Let go of what this stage no longer holds of the module outside its backbone.

        Args:
            owners: Who holds what.
            backbone: Dotted name of the module's own backbone.
        """
        if self._tensors is not None:
            placement = self._tensors.placement
            prefix = self._backbone.removesuffix(backbone)
            self._tensors = replace(self._tensors, placement=placement.settled(owners, prefix))
            self._tensors.withhold()

    def close(self, restore: bool) -> None:
        """Give the copy back, whole if it is to be restored."""
        for name in ("state_dict", "to"):
            self._module.__dict__.pop(name, None)
        if self._tensors is not None and restore:
            self._tensors.restore()
        if self._tensors is None or restore:
            to_meta(self._empty)

    def _state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The whole copy's on the first rank, for a checkpoint."""
        state: dict[str, Any] = type(self._module).state_dict(self._module, *args, **kwargs)
        if self._tensors is None or self._groups.replica or not self._gathers():
            return state
        return self._tensors.gather(state)

    def _to(self, device: torch.device | str) -> nn.Module:
        """Move what this stage holds."""
        if self._tensors is not None:
            for slot in self._tensors.placement.slots:
                slot.to(torch.device(device))
        return self._module
