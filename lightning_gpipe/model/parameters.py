"""Where the parameters and buffers of a module stand, and who needs them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.model.elsewhere import (
    HOLDER,
    Holder,
    ParameterElsewhere,
    elsewhere,
    is_elsewhere,
)
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.tensors import strides


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
        parts: The virtual stages that use it.
        also: A second stage that holds it.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    is_parameter: bool
    owner: int | None
    is_outside: bool
    parts: tuple[int, ...] = ()
    also: int | None = None

    def is_on(self, stage: int) -> bool:
        """Whether a stage holds it."""
        return self.owner is None or stage in (self.owner, self.also)

    @property
    def current(self) -> Tensor | None:
        """What stands there now, if it wasn't removed."""
        module, key = self.places[0]
        return (module._parameters if self.is_parameter else module._buffers).get(key)

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        value = self.current
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
        if isinstance(value, ParameterElsewhere):
            other: nn.Parameter = value
        else:
            other = nn.Parameter(value, requires_grad=parameter.requires_grad)
        own = {**parameter.__dict__}
        own.pop(HOLDER, None)
        other.__dict__.update(own)
        recurrent = [module for module, _ in self.places if isinstance(module, nn.RNNBase)]
        for module in recurrent:
            module._flat_weight_refs = []  # weak references, for what torch.compile does
        for module, _ in self.places:
            _drop_graphs(module)
        hooks: Any = parameter
        kept = hooks._backward_hooks, hooks._post_accumulate_grad_hooks
        try:
            with torch._C.DisableTorchFunctionSubclass():
                torch.utils.swap_tensors(parameter, other)
            for module in recurrent:
                module._init_flat_weights()
            hooks._backward_hooks, hooks._post_accumulate_grad_hooks = kept
        except RuntimeError as error:
            raise RuntimeError(
                f"Can't move the parameter {self.names[0]} between stages, because something holds"
                f" a weak reference to it or to its graph ({error}). Drop graphs and weak"
                " references to the model before the Trainer runs. PyTorch's profiler holds some"
                " with with_stack=True: leave that out, or use step='mini-batch'. Loops over blocks"
                " can't use their weights between two of them: write that into a block."
            ) from error

    def withhold(self, holder: Holder) -> None:
        """Put there what stands for a tensor that another stage holds."""
        self.replace(elsewhere(self.tensor, holder))

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


def _drop_graphs(module: nn.Module) -> None:
    """Drop the graphs of weights that hooks compute anew before each forward.

    Those of ``torch.nn.utils.weight_norm`` and ``torch.nn.utils.prune`` do.
    """
    for hook in module._forward_pre_hooks.values():
        for name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None)):
            weight = vars(module).get(name) if isinstance(name, str) else None
            if isinstance(weight, Tensor) and weight.grad_fn is not None:
                setattr(module, str(name), weight.detach())


def names_of(module: nn.Module) -> list[str]:
    """The names of a module's parameters, in order."""
    return [name for name, _ in module.named_parameters()]


def check_names(module: nn.Module, first: Sequence[str]) -> None:
    """Refuse a module whose parameters have other names, or another order, than on rank 0.

    Args:
        module: The user's module.
        first: Their names on rank 0.

    Raises:
        ValueError: If they differ.
    """
    for name, other in itertools.zip_longest(names_of(module), first):
        if name != other:
            raise ValueError(
                f"The module has the parameter {name!r} where it has {other!r} on rank 0. Build the"
                " same module in every process: go over lists or dictionaries, whose order is the"
                " same everywhere, or over sorted(names), since that of a set isn't."
            )


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """The entries of a backbone in order, a module that stands there twice included twice."""
    return [layer for layer in backbone._modules.values() if layer is not None]


def parameter_count(modules: Iterable[nn.Module]) -> int:
    """The number of trained values in modules, each parameter counted once."""
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())


def own_tensors(part: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers by name, without those of modules inside it."""
    entries = (*part._parameters.items(), *part._buffers.items())
    return [(name, tensor) for name, tensor in entries if tensor is not None]


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameters_of(slots: Iterable[Slot]) -> list[nn.Parameter]:
    """The parameters among tensors of a module."""
    tensors = (slot.tensor for slot in slots if slot.is_parameter)
    return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]


def slots_on_meta(modules: Iterable[nn.Module]) -> list[Slot]:
    """The parameters and buffers of modules that stand on the meta device, each once."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for key, tensor in own_tensors(module):
            if tensor.is_meta:
                places.setdefault(id(tensor), []).append((module, key))
    return [
        Slot((found[0][1],), tuple(found), found[0][1] in found[0][0]._parameters, None, False)
        for found in places.values()
    ]


def materialize(backbone: nn.Module) -> list[Slot]:
    """Give tensors on the meta device, where this rank wants no copy, empty memory on the host.

    Returns:
        Their places; what stands there means nothing until the module is cut.
    """
    return _materialized(slots_on_meta(backbone.modules()))


def materialize_elsewhere(module: nn.Module) -> None:
    """Give tensors that another stage holds empty memory on the host, to load them."""
    slots = slots_on_meta(module.modules())
    _materialized([slot for slot in slots if is_elsewhere(slot.tensor)])


def _materialized(slots: list[Slot]) -> list[Slot]:
    with torch.no_grad():
        for slot in slots:
            slot.replace(strides.empty_like(slot.tensor, "cpu"))
    return slots


def to_meta(slots: Iterable[Slot]) -> None:
    """Take back what :func:`materialize` did."""
    with torch.no_grad():
        for slot in slots:
            slot.replace(strides.empty_like(slot.tensor, "meta"))


@contextmanager
def loading_in_part() -> Iterator[None]:
    """Load state dicts into modules in this context of which parts stay on the meta device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        yield


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


def outside_modules(module: nn.Module, backbone: nn.Module) -> Iterator[nn.Module]:
    """The modules outside the backbone; one that stands in several places several times."""
    if module is not backbone:
        yield module
        for child in module.children():
            yield from outside_modules(child, backbone)


def outside_tensors(module: nn.Module, backbone: nn.Module) -> dict[int, Tensor]:
    """Parameters and buffers that stand outside the backbone, by ``id``."""
    parts = outside_modules(module, backbone)
    return {id(tensor): tensor for part in parts for _, tensor in own_tensors(part)}


def outside_buffers(module: nn.Module, backbone: nn.Module) -> list[Tensor]:
    """Buffers that stand outside the backbone, each once."""
    tensors = outside_tensors(module, backbone).values()
    return [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]


def slots_of(module: nn.Module, backbone: str, partition: Partition) -> Iterator[Slot]:
    """Every parameter and buffer of a module, with the stage that holds it."""
    parts: dict[int, dict[int, None]] = {}
    body = module.get_submodule(backbone)
    outside = outside_tensors(module, body)
    users: dict[int, set[int | None]] = {key: {None} for key in outside}
    for index, layer in enumerate(layers_of(body)):
        for tensor in (*layer.parameters(), *layer.buffers()):
            users.setdefault(id(tensor), set()).add(partition.stage_of(index))
            parts.setdefault(id(tensor), {})[partition.part_of(index)] = None
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in own_tensors(owner):
            names, places = found.setdefault(id(tensor), ([], []))
            names.append(f"{prefix}.{name}" if prefix else name)
            places.append((owner, name))
    for key, (names, places) in found.items():
        (first, name), stages = places[0], users.get(key, {None})
        is_parameter = name in first._parameters
        owner_stage = next(iter(stages)) if len(stages) == 1 else None
        used = tuple(parts.get(key, ()))
        yield Slot(tuple(names), tuple(places), is_parameter, owner_stage, key in outside, used)
