"""Runs a LightningModule's step up to the backbone's call, without values and without a Trainer."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.model.on_meta import Attributes, Pretended, to_meta_leaf
from lightning_gpipe.model.redirect import Redirections
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.pipeline.probe import Reached

_GIVE_INPUT = "give what the backbone is called with: plan(module, input=...)"


Ends: TypeAlias = tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True, slots=True)
class BackboneCall:
    """A call of the backbone.

    Args:
        input: What it is given, on the meta device.
        run_layer: Runs one of its layers.
        context: What surrounds it.
        ends: The parameters and buffers, by ``id``, that the step uses before the call, and those
            that it may use behind it; None: not known.
    """

    input: Any
    run_layer: RunLayer
    context: ForwardContext | None
    ends: Ends | None


def call_of(
    module: pl.LightningModule, backbone: str, batch: Any, device: torch.device
) -> BackboneCall:
    """Run a step up to the backbone's call, on tensors without values; the module stays as it is.

    Args:
        module: The module.
        backbone: Dotted name of its backbone.
        batch: What the step is given; None: the module's example is given to its forward.
        device: For which device tensors pass.

    Raises:
        ValueError: If the step needs values, or doesn't call the backbone, with what to do.
    """
    is_example = batch is None
    if is_example:
        batch = getattr(module, "example_input_array", None)
    if batch is None:
        raise ValueError(
            f"{type(module).__name__} has no example_input_array: give a batch, or {_GIVE_INPUT}."
        )
    try:
        found = _reached(module, backbone, batch, is_example, device)
    except Exception as error:
        raise ValueError(
            f"The step of {type(module).__name__} can't run up to the backbone '{backbone}' without"
            f" values, or without a Trainer ({type(error).__name__}: {error}). Instead"
            f" {_GIVE_INPUT}."
        ) from error
    if found is None:
        raise ValueError(
            f"The step of {type(module).__name__} doesn't call the backbone '{backbone}':"
            f" {_GIVE_INPUT}."
        )
    reached, ends = found
    sample = tree_map(lambda leaf: _alike(leaf, None), reached.sample)
    return BackboneCall(sample, reached.context.run_layer, reached.context, ends)


def _reached(
    module: pl.LightningModule,
    backbone: str,
    batch: Any,
    is_example: bool,
    device: torch.device,
) -> tuple[Reached, Ends] | None:
    """Run a step on tensors without values until it calls the backbone; None: it doesn't.

    What was used until then may be used once more if it stands in two places, as an embedding's
    weight that is the head's, too.
    """
    body, redirections = module.get_submodule(backbone), Redirections(is_alone=False)
    place = Pretended(device)

    def reached(input: Any, run: RunLayer = run_layer) -> Any:
        raise Reached(input, ForwardContext.current((), device, run))

    kept = [(part, Attributes(part)) for part in module.modules()]
    try:
        redirections.take_over(body)
        redirections.add(body, reached)
        keys = {id(fake): key for key, fake in _pretend(module, kept, place).items()}
        uses = _Uses(keys)
        module.__dict__.update(
            log=_nothing, log_dict=_nothing
        )  # no trainer runs that would take it
        given = tree_map(lambda leaf: _alike(leaf, place), batch)
        with torch.enable_grad(), place.mode, uses:
            _step(module, given, is_example)
    except Reached as found:
        held = (id(tensor) for part, _ in kept for tensor in _tensors_of(part))
        places = Counter(keys[fake] for fake in held if fake in keys)
        behind = {key for key, count in places.items() if key not in uses.seen or count > 1}
        return found, (frozenset(uses.seen), frozenset(behind))
    finally:
        redirections.end()
        for part, attributes in kept:
            attributes.restore(part)
    return None


def _nothing(*_: Any, **__: Any) -> None: ...


def _tensors_of(part: nn.Module) -> list[Tensor]:
    both = (*part._parameters.values(), *part._buffers.values())
    return [tensor for tensor in both if tensor is not None]


def _pretend(
    module: nn.Module, kept: Sequence[tuple[nn.Module, Attributes]], place: Pretended
) -> dict[int, Any]:
    """Put tensors without values in the places of a module's; return them by those' ``id``."""
    known: dict[int, Any] = {}
    for part, attributes in kept:
        attributes.prepare(part, True, None, place)
        for entries in (part._parameters, part._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        known[id(tensor)] = _alike(tensor, place)
                    entries[name] = known[id(tensor)]
    return known


class _Uses(TorchDispatchMode):
    """Notes which tensors operations are given.

    Args:
        known: By the ``id`` of those that may be noted what is noted of them.
    """

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._known = known
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        self.seen.update(self._known[id(x)] for x in leaves if id(x) in self._known)
        return func(*args, **(kwargs or {}))


def _alike(leaf: Any, place: Pretended | None) -> Any:
    """A tensor that looks like a given one and has no values; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = to_meta_leaf(leaf, place).requires_grad_(leaf.requires_grad)
    return nn.Parameter(found, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else found


def _step(module: pl.LightningModule, batch: Any, is_example: bool) -> None:
    if not is_example and is_overridden("training_step", module):
        parameters = inspect.signature(module.training_step).parameters
        takes_index = len(parameters) > 1
        module.training_step(*((batch, 0) if takes_index else (batch,)))
    elif isinstance(batch, Mapping):
        module(**batch)
    else:
        module(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
