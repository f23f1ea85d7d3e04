"""The whole module's names with one stage's tensors.

Layers of other stages stay in the module on the meta device: names, state-dict keys and the order
of the parameters are the whole model's, and no memory is used. Parameters keep their identity,
because optimizers and the user's code hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.model.parameters import Slot, layers_of, outside_tensors, outside_to, slots_of
from lightning_gpipe.model.partition import Partition


class Placement:
    """The module of one rank.

    Args:
        module: The user's module.
        backbone: Dotted name of its backbone.
        partition: Which layers each stage has.
        control: The pipeline's object channel.
        device: Where this stage's tensors go.
    """

    def __init__(
        self,
        module: nn.Module,
        backbone: str,
        partition: Partition,
        control: ObjectChannel,
        device: torch.device,
    ) -> None:
        self._module = module
        self._backbone = backbone
        self._partition = partition
        self._control = control
        self._device = device
        _check_batch_norm(module.get_submodule(backbone), partition)
        self.slots = list(slots_of(module, backbone, partition))
        self._owners = {id(slot.tensor): slot.owner for slot in self.slots if slot.is_parameter}

    @property
    def replicated(self) -> list[Slot]:
        """What every stage holds."""
        return [slot for slot in self.slots if slot.owner is None]

    @property
    def shared(self) -> list[Slot]:
        """What every stage holds because layers of several stages use it."""
        return [slot for slot in self.replicated if not slot.is_outside]

    @property
    def own(self) -> list[Slot]:
        """What this stage alone holds."""
        return [slot for slot in self.slots if slot.owner == self._control.stage]

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that holds a parameter; None: all do."""
        return self._owners.get(id(parameter))

    def is_here(self, owner: int | None) -> bool:
        """Whether this stage holds what a stage owns."""
        return owner is None or owner == self._control.stage

    def cut(self) -> None:
        """Give every stage its layers' tensors, with the first stage's values. Collective.

        What is outside the backbone stays as it is, in use already. See :func:`share_outside`.
        """
        with torch.no_grad():
            self._share()
            for slot in self._owned_elsewhere():
                if slot.tensor.device.type != "meta":
                    slot.replace(torch.empty_like(slot.tensor, device="meta"))
            for slot in self.slots:
                if not slot.is_outside:
                    slot.to(self._device)
            for module in self._module.modules():
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()  # as cuDNN wants them

    def restore(self) -> None:
        """Bring the whole module to the host memory of every rank. Collective."""
        with torch.no_grad():
            for slot in self.slots:
                slot.to(torch.device("cpu"))
            for slot in self.slots:
                if slot.owner is not None:
                    value = self._control.broadcast("state", slot.tensor.data, source=slot.owner)
                    if not self.is_here(slot.owner):
                        slot.replace(value)

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make the module's state dict whole. Collective.

        Args:
            state: The module's own on this stage.

        Returns:
            On the first stage the whole module's, on others the same keys with meta tensors for
            what isn't there.
        """
        slots = {name: slot for slot in self.slots for name in slot.names}
        gathered: dict[str, Any] = {}
        for key, value in state.items():
            slot = slots.get(key)
            owner = slot.owner if slot else self._owner_of_key(key)
            if owner:
                name = slot.names[0] if slot else key
                if name not in gathered:
                    gathered[name] = self._to_first(owner, value)
                state[key] = gathered[name]
        return state

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict. Collective.

        Returns:
            On the first stage that of an optimizer of the whole module; on others their own part.
        """
        state: dict[str, Any] = optimizer.state_dict()
        owners = self._owners_of(optimizer)
        own = {i: s for i, s in state["state"].items() if self.is_here(owners[i])}
        for stage in range(1, len(self._control.ranks)):
            theirs = self._to_first(stage, {i: s for i, s in own.items() if owners[i] == stage})
            if self._control.stage == 0:
                own.update(theirs)
        state["state"] = dict(sorted(own.items()))
        return state

    def own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole module's optimizer state dict that this stage holds."""
        owners = self._owners_of(optimizer)
        return {
            **state,
            "state": {i: s for i, s in state["state"].items() if self.is_here(owners[int(i)])},
        }

    def drop_optimizer_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Drop the optimizers' state of parameters that other stages hold."""
        for optimizer in optimizers:
            for parameter in list(optimizer.state):
                if not self.is_here(self.owner(parameter)):
                    del optimizer.state[parameter]

    def _share(self) -> None:
        """Send the first stage's values to the stages that hold them.

        Unseeded processes start from others.
        """
        shared = [slot.tensor.data for slot in self.shared]
        values = self._control.broadcast("state", shared, source=0)
        for slot, value in zip(self.shared, values, strict=True):
            self._set(slot, value)
        for slot in self.slots:
            if slot.owner and self._control.stage == 0:
                self._control.send("state", slot.tensor.data, to=slot.owner)
            elif slot.owner and self.is_here(slot.owner):
                self._set(slot, self._control.receive("state", source=0))

    @staticmethod
    def _set(slot: Slot, value: Tensor) -> None:
        if slot.tensor.device.type == "meta":
            slot.replace(value)
        else:
            slot.tensor.copy_(value)

    def _owned_elsewhere(self) -> Iterator[Slot]:
        return (slot for slot in self.slots if not self.is_here(slot.owner))

    def _to_first(self, owner: int, value: Any) -> Any:
        """Move a value from a stage to the first one's host memory; others keep theirs."""
        if self._control.stage == owner:
            self._control.send("state", _to_host(value), to=0)
        elif self._control.stage == 0:
            return self._control.receive("state", source=owner)
        return value

    def _owners_of(self, optimizer: Optimizer) -> list[int | None]:
        return [self.owner(p) for group in optimizer.param_groups for p in group["params"]]

    def _owner_of_key(self, key: str) -> int | None:
        """The stage of an entry that is no parameter or buffer, such as extra state."""
        for index, name in enumerate(self._module.get_submodule(self._backbone)._modules):
            if key.startswith(f"{self._backbone}.{name}."):
                return self._partition.stage_of(index)
        return None


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
        values = groups.decide("state", lambda: [tensor.data for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _check_batch_norm(backbone: nn.Module, partition: Partition) -> None:
    """Refuse running statistics that several stages would move."""
    stages: dict[nn.Module, set[int]] = {}
    for index, layer in enumerate(layers_of(backbone)):
        for module in layer.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                stages.setdefault(module, set()).add(partition.stage_of(index))
    for module, users in stages.items():
        if len(users) > 1:
            raise ValueError(
                f"One {type(module).__name__} with running statistics is used by stages"
                f" {sorted(users)}, which can't both move them: use one layer each, or a"
                " `balance` that keeps its users on one stage."
            )


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_host, value))
    return value


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
            first = groups.siblings.broadcast("state", (slot.names, own), source=0)
            if first[0] != slot.names or first[1].shape != own.shape or first[1].dtype != own.dtype:
                raise RuntimeError(
                    f"{slot.names[0]} of shape {tuple(own.shape)} on replica {groups.replica} is"
                    f" {first[0][0]} of shape {tuple(first[1].shape)} on replica 0: build the same"
                    " module on every rank."
                )
            own.copy_(first[1])
    groups.siblings.flush()
