"""Moves the values of a module to the ranks that hold them, and gathers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import MessageKind, ObjectChannel
from lightning_gpipe.model.elsewhere import Holder, is_elsewhere
from lightning_gpipe.model.parameters import Slot, outside_tensors, outside_to
from lightning_gpipe.state.placement import Placement


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The tensors of a module on one rank, and their way to and from the other stages.

    Layers of other stages stay in the module on the meta device: names, state-dict keys and the
    order of the parameters are the whole model's, and no memory is used. Parameters keep their
    identity, because optimizers and the user's code hold them.

    Args:
        placement: Which stage holds what.
        channel: The pipeline's object channel.
        device: Where this stage's tensors go.
    """

    placement: Placement
    channel: ObjectChannel
    device: torch.device

    @torch.no_grad()
    def cut(self, is_sent: Callable[[Slot], bool] = lambda slot: True) -> None:
        """Give every stage its layers' tensors, with the first stage's values. Collective.

        What is outside the backbone stays as it is, in use already. See :func:`share_outside`.

        Args:
            is_sent: Whether the first stage has the values; else each that holds them has.
        """
        self._share([slot for slot in self.placement.slots if is_sent(slot)])
        self.withhold()
        for slot in self.placement.slots:
            if not slot.is_outside:
                slot.to(self.device)
        for module in {id(m): m for slot in self.placement.slots for m, _ in slot.places}.values():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # as cuDNN wants them

    @torch.no_grad()
    def withhold(self) -> None:
        """Let go of what other stages hold."""
        for slot in self.placement.elsewhere:
            if slot.owner is not None and not is_elsewhere(slot.tensor):
                ranks, here = self.channel.ranks, self.channel.index
                slot.withhold(
                    Holder(slot.names[0], slot.owner, ranks[slot.owner], here, ranks[here])
                )

    @torch.no_grad()
    def restore(self, is_whole: bool = True) -> None:
        """Bring the module to the host memory of every rank. Collective.

        Args:
            is_whole: Whether each rank gets the layers of other stages, too.
        """
        host, channel = torch.device("cpu"), self.channel
        for slot in self.placement.slots:
            current = slot.current  # the user may have removed it after the last step
            if slot.owner is not None and (
                is_whole or slot.is_outside
            ):  # one by one from the device: there is room for one more
                values = None if current is None else current.data
                values = channel.broadcast("restored weights", values, source=slot.owner)
                channel.flush()
                is_here = slot.is_on(self.placement.stage)
                if not is_here and current is not None and values is not None:
                    slot.replace(values.to(host))
            if current is not None:
                slot.to(host)

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make the module's state dict whole. Collective.

        Args:
            state: The module's own on this stage.

        Returns:
            On the first stage the whole module's, on others the same keys with meta tensors for
            what isn't there.
        """
        first_name = {name: slot.names[0] for slot in self.placement.slots for name in slot.names}
        gathered: dict[str, Any] = {}
        own = [key for key in state if key not in first_name]
        others = self.channel.gather("keys", own)
        # what a layer has made since the cut comes last, in the same order everywhere
        for key in sorted(set().union(*others) - set(others[0]).intersection(*others)):
            if key in state or not self.placement.stage:
                state[key] = state.pop(key, None)
        for key, value in [*state.items()]:
            owner = self.placement.owner_of_key(key)
            if owner:
                name = first_name.get(key, key)
                if name not in gathered:
                    gathered[name] = to_first(self.channel, "state dict", owner, value)
                state[key] = gathered[name]
        return state

    def _share(self, slots: Sequence[Slot]) -> None:
        """Send the first stage's values to the stages that hold them.

        Unseeded processes start from others.
        """
        channel = self.channel
        shared = [slot for slot in slots if slot.owner is None and not slot.is_outside]
        own = [slot.tensor.data for slot in shared]
        values = channel.broadcast("shared weights", own, source=0)
        for slot, value in zip(shared, values, strict=True):
            _set(slot, value)
        for slot in slots:
            if slot.owner and channel.index == 0:
                value = slot.tensor.data
                if not channel.through_host:
                    value = value.to(self.device)
                channel.send("stage weights", value, to=slot.owner)
            elif slot.owner == self.placement.stage and slot.owner:
                _set(slot, channel.receive("stage weights", source=0))


class PartialStateDict:
    """A hook that warns of a state dict without what other stages hold; copies are silent.

    Args:
        warn: Warns on rank 0.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn: Callable[[str], object] | None = warn

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """See ``Module.register_state_dict_post_hook``."""
        if self._warn is not None:
            self._warn(
                "While the Trainer runs, state_dict() has the values of one stage's layers; others"
                " are on the meta device. To save the whole, call trainer.save_checkpoint(path,"
                " weights_only=True) on every rank, or state_dict() after the Trainer."
            )
            self._warn = None  # once

    def __deepcopy__(self, memo: Any) -> PartialStateDict:
        return PartialStateDict(lambda text: None)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Say nothing meanwhile."""
        warn, self._warn = self._warn, None
        try:
            yield
        finally:
            self._warn = warn


def share_outside(
    module: nn.Module, backbone: nn.Module, groups: Groups, device: torch.device
) -> None:
    """Move what is outside the backbone to a device, with rank 0's values. Collective.

    Args:
        module: The user's module.
        backbone: The part of it that is cut.
        groups: The process groups.
        device: Where to.
    """
    outside_to(module, backbone, device)
    with torch.no_grad():
        tensors = list(outside_tensors(module, backbone).values())
        values = groups.decide("outside weights", lambda: [tensor.data for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def share_over_replicas(slots: Sequence[Slot], groups: Groups) -> None:
    """Give every replica the first one's values. Collective over the replicas of a stage.

    Args:
        slots: Parameters and buffers that this rank holds.
        groups: The process groups.

    Raises:
        RuntimeError: If the replicas' modules differ.
    """
    if groups.replicas == 1:
        return
    with torch.no_grad():
        for slot in slots:
            own = slot.tensor.data
            first = groups.siblings.broadcast("replica weights", (slot.names, own), source=0)
            if first[0] != slot.names or first[1].shape != own.shape or first[1].dtype != own.dtype:
                raise RuntimeError(
                    f"{slot.names[0]} of shape {tuple(own.shape)} on replica {groups.replica} is"
                    f" {first[0][0]} of shape {tuple(first[1].shape)} on replica 0: build the same"
                    " module on every rank."
                )
            own.copy_(first[1])
    groups.siblings.flush()


def to_first(channel: ObjectChannel, kind: MessageKind, owner: int, value: Any) -> Any:
    """Move a value from a member to the first one's host memory; others keep theirs.

    Collective over the first member and the one that holds the value.
    """
    if channel.index == owner:
        channel.send(kind, value, to=0)
    elif channel.index == 0:
        return channel.receive(kind, source=owner, device=torch.device("cpu"))
    return value


def _set(slot: Slot, value: Tensor) -> None:
    if slot.tensor.device.type == "meta":
        slot.replace(value)
    else:
        slot.tensor.copy_(value)
