"""The whole module's names with one stage's tensors.

Layers of other stages stay in the module on the meta device: names, state-dict keys and the order
of the parameters are the whole model's, and no memory is used. Parameters keep their identity,
because optimizers and the user's code hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Links
from lightning_gpipe.comm.messages import Control
from lightning_gpipe.model.partition import Partition


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of the module.

    Args:
        names: Its dotted names; several if modules share it.
        places: The modules that hold it, and its key in each.
        is_parameter: Whether it is a parameter.
        owner: The stage that holds it; None: every stage does, because it is used outside the
            backbone or by several stages.
        is_outside: Whether it is used outside the backbone.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    is_parameter: bool
    owner: int | None
    is_outside: bool

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        module, key = self.places[0]
        value = (module._parameters if self.is_parameter else module._buffers)[key]
        if value is None:
            raise RuntimeError(f"{self.names[0]} was removed from its module during the run.")
        return value

    def replace(self, value: Tensor) -> None:
        """Put another tensor there, on any device; a parameter stays the same object."""
        if not self.is_parameter:
            for module, key in self.places:
                module._buffers[key] = value
            return
        parameter = self.tensor
        other = nn.Parameter(value, requires_grad=parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        recurrent = [module for module, _ in self.places if isinstance(module, nn.RNNBase)]
        for module in recurrent:
            module._flat_weight_refs = []  # weak references, for what torch.compile does
        try:
            torch.utils.swap_tensors(parameter, other)
            for module in recurrent:
                module._init_flat_weights()
        except RuntimeError as error:
            raise RuntimeError(
                f"Can't move the parameter {self.names[0]} between stages, because something holds"
                f" a weak reference to it or to its graph ({error}). Drop graphs and weak"
                " references to the model before the Trainer runs. The old"
                " torch.nn.utils.weight_norm holds one: use parametrizations.weight_norm."
            ) from error

    def to(self, device: torch.device) -> None:
        """Move it, if it isn't on the meta device. A parameter stays the same object."""
        tensor = self.tensor
        if tensor.device.type == "meta" or tensor.device == device:
            return
        if self.is_parameter:
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(device)
        else:
            self.replace(tensor.to(device))


class Skeleton:
    """The module of one rank.

    Args:
        module: The user's module.
        backbone: Dotted name of its backbone.
        partition: Which layers each stage has.
        control: The pipeline's control channel.
        device: Where this stage's tensors go.
    """

    def __init__(
        self,
        module: nn.Module,
        backbone: str,
        partition: Partition,
        control: Control,
        device: torch.device,
    ) -> None:
        self._module = module
        self._backbone = backbone
        self._partition = partition
        self._control = control
        self._device = device
        _check_batch_norm(module.get_submodule(backbone), partition)
        self.slots = list(_slots(module, backbone, partition))
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


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """The entries of a backbone in order, a module that stands there twice included twice."""
    return [layer for layer in backbone._modules.values() if layer is not None]


def share_outside(
    module: nn.Module, backbone: nn.Module, links: Links, device: torch.device
) -> None:
    """Move what is outside the backbone to a device, with rank 0's values. Collective.

    Args:
        module: The user's module.
        backbone: The part of it that is cut.
        links: The process groups.
        device: Where to.
    """
    outside_to(module, backbone, device)
    with torch.no_grad():
        tensors = list(_outside_tensors(module, backbone).values())
        values = links.decide("state", lambda: [tensor.data for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def materialize(backbone: nn.Module) -> list[Slot]:
    """Give tensors on the meta device, where this rank wants no copy, empty memory on the host.

    Returns:
        Their places; what stands there means nothing until the module is cut.
    """
    places: dict[int, tuple[list[tuple[nn.Module, str]], bool]] = {}
    for module in backbone.modules():
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    places.setdefault(id(tensor), ([], is_parameter))[0].append((module, key))
    slots = [
        Slot((found[0][1],), tuple(found), is_parameter, None, False)
        for found, is_parameter in places.values()
    ]
    with torch.no_grad():
        for slot in slots:
            slot.replace(torch.empty_like(slot.tensor, device="cpu"))
    return slots


def to_meta(slots: Iterable[Slot]) -> None:
    """Take back what :func:`materialize` did."""
    with torch.no_grad():
        for slot in slots:
            slot.replace(torch.empty_like(slot.tensor, device="meta"))


def outside_to(module: nn.Module, backbone: nn.Module, device: torch.device) -> None:
    """Move a module without its backbone: tensors, and what modules such as metrics move along."""
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is backbone
    ]
    for parent, name in places:
        parent._modules[name] = None
    try:
        module.to(device)
    finally:
        for parent, name in places:
            parent._modules[name] = backbone


def _outside_places(module: nn.Module, backbone: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if module is backbone:
        return
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield module, key
    for child in module.children():
        yield from _outside_places(child, backbone)


def _outside_tensors(module: nn.Module, backbone: nn.Module) -> dict[int, Tensor]:
    """Parameters and buffers that stand outside the backbone, by ``id``."""
    tensors = [getattr(owner, key) for owner, key in _outside_places(module, backbone)]
    return {id(tensor): tensor for tensor in tensors}


def _slots(module: nn.Module, backbone: str, partition: Partition) -> Iterator[Slot]:
    body = module.get_submodule(backbone)
    outside = _outside_tensors(module, body)
    users: dict[int, set[int | None]] = {key: {None} for key in outside}
    for index, layer in enumerate(layers_of(body)):
        for tensor in (*layer.parameters(), *layer.buffers()):
            users.setdefault(id(tensor), set()).add(partition.stage_of(index))
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]], bool]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for values, is_parameter in ((owner._parameters, True), (owner._buffers, False)):
            for key, tensor in values.items():
                if tensor is not None:
                    names, places, _ = found.setdefault(id(tensor), ([], [], is_parameter))
                    names.append(f"{prefix}.{key}" if prefix else key)
                    places.append((owner, key))
    for key, (names, places, is_parameter) in found.items():
        stages = users.get(key, {None})
        owner_stage = next(iter(stages)) if len(stages) == 1 else None
        yield Slot(tuple(names), tuple(places), is_parameter, owner_stage, key in outside)


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
