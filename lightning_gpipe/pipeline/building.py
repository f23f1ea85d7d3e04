"""Gives the layers of a module that stand on the meta device their values, where they are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.elsewhere import is_elsewhere
from lightning_gpipe.model.lazy import LazyModule, Unbuilt, attributes_on_meta, children_first
from lightning_gpipe.model.parameters import Slot, slots_on_meta
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.state.placement import Placement


@dataclass(frozen=True, slots=True)
class Building:
    """What each rank builds by itself of a module, once it knows what it holds.

    Args:
        module: The user's module.
        body: Its backbone.
        backbone: The backbone's dotted name.
        layers: The backbone's.
        lazy: How the tensors come by their values.
        names: Those of the backbone that the first stage has no values of, by their dotted names.
        seed: Of the layers' random numbers, the same on every rank.
    """

    module: nn.Module
    body: nn.Module
    backbone: str
    layers: Sequence[nn.Module]
    lazy: LazyModule
    names: frozenset[str]
    seed: int

    @classmethod
    def of(
        cls,
        module: nn.Module,
        backbone: str,
        layers: Sequence[nn.Module],
        groups: Groups,
        seed: int,
    ) -> Building:
        """Find out what is to be built. Collective over all ranks.

        Raises:
            RuntimeError: If the ranks' modules differ.
            ValueError: If a layer can't be given values, with what to do.
        """
        body, lazy = module.get_submodule(backbone), LazyModule.of(module)
        tensors = {
            name: tensor
            for names in (body.named_parameters, body.named_buffers)
            for name, tensor in names(f"{backbone}", remove_duplicate=False)
        }
        if lazy.kept is not None:
            return cls(module, body, backbone, layers, lazy, frozenset(tensors), seed)
        own = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
        is_cut = any(map(is_elsewhere, tensors.values()))
        names, is_cut = groups.decide("unbuilt layers", lambda: (own, is_cut))
        if is_cut:
            raise RuntimeError(
                "Rank 0 holds a part of the model only, because an earlier run was interrupted:"
                " build the module anew, and give the Trainer a checkpoint to go on from."
            )
        if names and names != own:
            different = sorted({*names} ^ {*own})[0]
            raise RuntimeError(
                f"'{different}' stands on the meta device on rank 0 or on this one, not on both:"
                " build the same module on every rank."
            )
        building = cls(module, body, backbone, layers, lazy, frozenset(names), seed)
        building._check()
        return building

    @property
    def keeps_parts(self) -> bool:
        """Whether each rank goes on with its own part when the run is over."""
        return bool(self.names)

    def held(self, stages: int, virtual_stages: int) -> Partition | None:
        """Which layers each stage holds since an earlier run; None: nothing was cut.

        Args:
            stages: K.
            virtual_stages: V.

        Raises:
            ValueError: If these aren't that run's.
        """
        held = self.lazy.kept
        if held is not None and (held.count, held.virtual_stages) != (stages, virtual_stages):
            raise ValueError(
                f"Each process holds the layers of one of {held.count} stages (x"
                f" {held.virtual_stages} virtual ones) since an earlier run, because the module was"
                f" built on the meta device; this one has {stages} (x {virtual_stages}). Save a"
                " checkpoint, and go on from it with a module that is built anew."
            )
        return held

    def build_outside(self) -> None:
        """Give values to what stands outside the backbone, on every rank alike."""
        parts = children_first(self.module, without=self.body)
        slots = slots_on_meta(parts)
        if slots:
            self._fill(slots, self.lazy.values(parts, self.seed, "the module"), None)

    def build_all(self) -> None:
        """Give values to the whole backbone."""
        for index, layer in enumerate(self.layers):
            self._build(index, slots_on_meta(children_first(layer)), None)
        self.lazy.forget()

    def filled(self, state: dict[str, Any]) -> dict[str, Any]:
        """Put values into a state dict where it has none, and leave the module as it is.

        Args:
            state: The module's.
        """
        values: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers if self.names else ()):
            if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
                values = {**self._values(index), **values}
        for named in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if name in state and id(tensor) in values:
                    state[name] = values[id(tensor)].to(tensor.dtype)
        return state

    def build_own(self, placement: Placement, device: torch.device) -> None:
        """Give values to what this rank holds of the backbone, on its device.

        Args:
            placement: Which stage holds what.
            device: This rank's.
        """
        first: dict[int, int] = {}  # the layer that is built first with a tensor
        for index, layer in enumerate(self.layers):
            for tensor in (*layer.parameters(), *layer.buffers()):
                first.setdefault(id(tensor), index)
        wanted: dict[int, list[Slot]] = {}
        for slot in placement.slots:
            tensor = slot.tensor
            if slot.is_on(placement.stage) and tensor.is_meta and id(tensor) in first:
                wanted.setdefault(first[id(tensor)], []).append(slot)
        for index, slots in wanted.items():
            self._build(index, slots, device)
        self.lazy.forget()

    def _build(self, index: int, slots: Sequence[Slot], device: torch.device | None) -> None:
        self._fill(slots, self._values(index), device)

    def _values(self, index: int) -> dict[int, torch.Tensor]:
        parts, name = children_first(self.layers[index]), f"{self.backbone}.{index}"
        return self.lazy.values(parts, self.seed + 1 + index, name)

    @staticmethod
    def _fill(
        slots: Sequence[Slot], values: dict[int, torch.Tensor], device: torch.device | None
    ) -> None:
        with torch.no_grad():
            for slot in slots:
                tensor = slot.tensor
                slot.replace(values.pop(id(tensor)).to(device, tensor.dtype))

    def _check(self) -> None:
        self.lazy.check(children_first(self.module, without=self.body), "the module")
        for index, layer in enumerate(self.layers):
            self.lazy.check(children_first(layer), f"{self.backbone}.{index}")
        if slots_on_meta(self.module.modules()) and (found := attributes_on_meta(self.module)):
            part, name = found[0]
            raise Unbuilt(
                f"{type(part).__name__} has an attribute on the meta device, '{name}', which gets"
                " no value, since it is no parameter or buffer (as states of metrics aren't): build"
                " it outside torch.device('meta'), or the whole module in configure_model()."
            )
