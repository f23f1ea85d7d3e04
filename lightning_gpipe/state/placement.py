"""Which stage holds what of a module: names and stages, without moving anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpipe.model.parameters import Slot, layers_of, slots_of
from lightning_gpipe.model.partition import Partition

#: Of parameters by name: the stage that holds each, and a second one.
Owners: TypeAlias = Mapping[str, tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which stage holds which parameter, buffer and state-dict entry of a module.

    Args:
        stage: This rank's.
        slots: Every parameter and buffer, in the module's order.
        layers: The stage of each layer of the backbone, by the layer's dotted name.
        parameters: The slot of each parameter by ``id``.
    """

    stage: int
    slots: tuple[Slot, ...]
    layers: Mapping[str, int]
    parameters: Mapping[int, Slot]

    @classmethod
    def of(cls, module: nn.Module, backbone: str, partition: Partition, stage: int) -> Placement:
        """The placement of a whole module.

        Args:
            module: The user's module.
            backbone: Dotted name of its backbone.
            partition: Which layers each stage has.
            stage: This rank's stage.

        Raises:
            ValueError: If stages share running statistics of batch norm.
        """
        body = module.get_submodule(backbone)
        _check_batch_norm(body, partition)
        slots = tuple(slots_of(module, backbone, partition))
        return cls(
            stage,
            slots,
            {f"{backbone}.{key}": partition.stage_of(i) for i, key in enumerate(body._modules)},
            {id(slot.tensor): slot for slot in slots if slot.is_parameter},
        )

    def settled(self, owners: Owners, prefix: str = "") -> Placement:
        """The placement once it is known which stages need what is outside the backbone.

        Args:
            owners: Who holds the parameters that not every stage needs, by their first name.
            prefix: What stands before these names here.
        """
        slots = []
        for slot in self.slots:
            found = owners.get(slot.names[0].removeprefix(prefix)) if slot.is_parameter else None
            slots.append(slot if found is None else replace(slot, owner=found[0], also=found[1]))
        parameters = {id(slot.tensor): slot for slot in slots if slot.is_parameter}
        return replace(self, slots=tuple(slots), parameters=parameters)

    @property
    def replicated(self) -> list[Slot]:
        """What every stage holds."""
        return [slot for slot in self.slots if slot.owner is None]

    @property
    def shared(self) -> list[Slot]:
        """What every stage holds because layers of several stages use it."""
        return [slot for slot in self.replicated if not slot.is_outside]

    @property
    def shared_buffers(self) -> list[Slot]:
        """Buffers that layers of several virtual stages use, on whichever stage."""
        inside = (slot for slot in self.slots if not slot.is_parameter and not slot.is_outside)
        return [slot for slot in inside if len(slot.parts) > 1]

    @property
    def own(self) -> list[Slot]:
        """What this stage alone holds."""
        return [slot for slot in self.slots if slot.owner == self.stage and slot.also is None]

    @property
    def on_ends(self) -> list[Slot]:
        """What the first and the last stage hold, if this is one of them."""
        return [slot for slot in self.slots if slot.also is not None and slot.is_on(self.stage)]

    @property
    def elsewhere(self) -> list[Slot]:
        """What other stages hold, and this one doesn't."""
        return [slot for slot in self.slots if not slot.is_on(self.stage)]

    def owner(self, parameter: Tensor) -> int | None:
        """The stage that holds a parameter; None: all do."""
        slot = self.parameters.get(id(parameter))
        return slot.owner if slot is not None else None

    def holders(self, tensor: Tensor) -> frozenset[int] | None:
        """The stages that hold a parameter; None: all do."""
        slot = self.parameters.get(id(tensor))
        if slot is None or slot.owner is None:
            return None
        return frozenset({slot.owner} if slot.also is None else {slot.owner, slot.also})

    def owner_of_key(self, key: str) -> int | None:
        """The stage that holds an entry of the state dict, extra state included; None: all do."""
        for slot in self.slots:
            if key in slot.names:
                return slot.owner
        stages = (stage for layer, stage in self.layers.items() if key.startswith(f"{layer}."))
        return next(stages, None)

    def writes(self, replica: int) -> Callable[[str], bool]:
        """What of a state dict this rank writes, where all ranks write together.

        Parameters are the same on all ranks that hold them, which share them out. Of anything else,
        such as buffers, the first replica's and, where all stages have one, the first stage's
        counts.

        Args:
            replica: This rank's pipeline.

        Returns:
            Tells it by an entry's key.
        """
        slots = {name: slot for slot in self.slots for name in slot.names}

        def is_written(key: str) -> bool:
            slot = slots.get(key)
            if slot is not None and slot.is_parameter:
                return slot.is_on(self.stage)
            owner = self.owner_of_key(key) if slot is None else slot.owner
            return replica == 0 and (owner or 0) == self.stage

        return is_written

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this stage holds a parameter."""
        slot = self.parameters.get(id(parameter))
        return slot is None or slot.is_on(self.stage)


def _check_batch_norm(backbone: nn.Module, partition: Partition) -> None:
    """Refuse running statistics that several stages would move."""
    stages: dict[nn.Module, set[int]] = {}
    for index, layer in enumerate(layers_of(backbone)):
        for module in layer.modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                stages.setdefault(module, set()).add(partition.part_of(index))
    kind = "virtual stages" if partition.virtual_stages > 1 else "stages"
    for module, users in stages.items():
        if len(users) > 1:
            raise ValueError(
                f"One {type(module).__name__} with running statistics is used by {kind}"
                f" {sorted(users)}, which can't both move them: use one layer each, or a"
                " `balance` that keeps its users on one stage."
            )
