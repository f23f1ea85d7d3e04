"""Runs a LightningModule's step without values and without a Trainer."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.failure.reason import line_of
from lightning_gpipe.model.checkpointing import unchecked
from lightning_gpipe.model.layer_state import generators_of
from lightning_gpipe.model.on_meta import Attributes, Pretended, graph_leaf_on_meta
from lightning_gpipe.model.parameters import layers_of, own_tensors
from lightning_gpipe.model.redirect import Redirections
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.pipeline.probe import Reached
from lightning_gpipe.plan.step_memory import SeenStep, StepMemory, StepWatch, output_of
from lightning_gpipe.strategy.stand_ins import nothing, stand_ins
from lightning_gpipe.strategy.transfer_hooks import HookFailed, transferred
from lightning_gpipe.tensors.random_state import own_preserved
from lightning_gpipe.tensors.tree import CONSTANTS, Tree

_GIVE_INPUT = "give what the backbone is called with: plan(module, input=...)"


@dataclass(frozen=True, slots=True)
class BackboneCall:
    """A call of the backbone.

    Args:
        input: What it is given, on the meta device.
        run_layer: Runs one of its layers.
        context: What surrounds it.
        seen: What the step uses and holds; None: not known.
    """

    input: Any
    run_layer: RunLayer
    context: ForwardContext | None
    seen: SeenStep | None


def call_of(
    module: pl.LightningModule,
    backbone: str,
    batch: Any,
    device: torch.device,
    optimizers: Sequence[Optimizer] | None = None,
) -> BackboneCall:
    """Run a step on tensors without values; the module stays as it is.

    What comes behind the backbone's call may need values: then it isn't known what that holds.

    Args:
        module: The module.
        backbone: Dotted name of its backbone.
        batch: What the data loader gives; the step gets what the hooks of its transfer make of it.
            None: the module's example is given to its forward.
        device: For which device tensors pass.
        optimizers: The module's, for which others stand; None: not known.

    Raises:
        ValueError: If the step or a hook needs values, or the step doesn't call the backbone, with
            what to do.
    """
    is_example = batch is None
    if is_example:
        batch = getattr(module, "example_input_array", None)
    if batch is None:
        raise ValueError(
            f"{type(module).__name__} has no example_input_array: give a batch, or {_GIVE_INPUT}."
        )
    try:
        found = _reached(module, backbone, batch, is_example, device, optimizers)
    except HookFailed:
        raise
    except Exception as error:
        raise ValueError(
            f"The step of {type(module).__name__} raised an error for this batch before it called"
            f" the backbone '{backbone}': {line_of(error)}. It was given the batch's shapes without"
            f" values, and no Trainer: if it needs these, {_GIVE_INPUT}."
        ) from error
    if found is None:
        raise ValueError(
            f"The step of {type(module).__name__} doesn't call the backbone '{backbone}':"
            f" {_GIVE_INPUT}."
        )
    reached, seen = found
    sample = tree_map(lambda leaf: _alike(leaf, None), reached.sample)
    return BackboneCall(sample, reached.context.run_layer, reached.context, seen)


def _reached(
    module: pl.LightningModule,
    backbone: str,
    batch: Any,
    is_example: bool,
    device: torch.device,
    optimizers: Sequence[Optimizer] | None,
) -> tuple[Reached, SeenStep] | None:
    """Run a step on tensors without values; None: it doesn't call the backbone.

    Where it can't run to its end, what wasn't used before the call may be used behind it, and what
    was, once more, if it stands in two places, as an embedding's weight that is the head's, too.
    """
    body, redirections = module.get_submodule(backbone), Redirections(is_alone=False)
    place, watch = Pretended(device).for_backwards(), StepWatch()
    reached: list[Reached] = []
    used: set[int] = set()
    memory: StepMemory | None = None
    behind: set[int] | None = None

    @unchecked()
    def call(input: Any, run: RunLayer = run_layer) -> Any:
        found = Reached(input, ForwardContext.current((), device, run))
        if not reached:
            used.update(uses.seen)
        reached.append(found)
        if len(reached) > 1 or is_example or not module.automatic_optimization:
            raise found  # what follows isn't known, or mustn't run
        module.__dict__["_trainer"] = None  # nothing that follows may reach one
        watch.enter()
        given = Tree.of(input, "The backbone's input")
        made = output_of(layers_of(body), run, input, place)
        leaves = list(made.leaves)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = watch.leave(given.tensors(), [leaves[i] for i in tensors])
        for i, output in zip(tensors, outputs, strict=True):
            leaves[i] = output
        uses.seen.clear()
        return made.with_leaves(leaves).value()

    parts = [*module.modules()]
    kept = Attributes(parts)
    try:
        redirections.take_over(body)
        redirections.add(body, call)
        is_training = any(part.training for part in parts)
        kept.prepare(True, None if is_training else True, place)
        keys = {id(fake): key for key, fake in _pretend(parts, place).items()}
        # a part may keep the module's own tensors in a list, as an LSTM does
        uses = _Uses(keys | {key: key for key in keys.values()})
        module.__dict__.update(stand_ins(optimizers))
        for part in parts:
            if isinstance(part, Metric | MetricCollection):  # they check values
                part.__dict__.update(update=nothing, forward=_no_value, compute=_no_value)
        given = tree_map(lambda leaf: _own_alike(leaf, place), batch)
        try:
            own = own_preserved(generators_of(module, body).values())
            with torch.enable_grad(), redirect_stdout(StringIO()), place.mode, own:
                if not is_example:  # what hooks use and hold isn't the step's
                    with _Uses({}):
                        given = transferred(module, given, place.device)
                with watch, uses:
                    loss = _loss_of(_step(module, given, is_example))
                    if reached and loss is not None:  # it has come to its end
                        behind = set(uses.seen)  # a backward uses what stands before the call, too
                        memory = watch.finish(loss, module.parameters())
        except Reached:
            pass
        except Exception:
            if not reached:
                raise
        if not reached:
            return None
        if behind is None:
            held = (id(tensor) for part in parts for _, tensor in own_tensors(part))
            places = Counter(keys[fake] for fake in held if fake in keys)
            again = {key for key, count in places.items() if count > 1}
            behind = again | (places.keys() - used)
        return reached[0], SeenStep(frozenset(used), frozenset(behind), memory)
    finally:
        redirections.end()
        kept.restore()


def _no_value(*_: Any, **__: Any) -> Tensor:
    return torch.zeros((), device="cpu")


def _pretend(parts: Sequence[nn.Module], place: Pretended) -> dict[int, Any]:
    """Put tensors without values in the places of modules'; return them by those' ``id``."""
    known: dict[int, Any] = {}
    for part in parts:
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
        if func._schema.is_mutable:
            _check_written(func._schema.arguments, args)
        leaves = tree_leaves((args, kwargs or {}))
        self.seen.update(self._known[id(x)] for x in leaves if id(x) in self._known)
        return func(*args, **(kwargs or {}))


def _check_written(arguments: Sequence[Any], args: Sequence[Any]) -> None:
    """Let no operation write to a tensor with values, which is somebody's.

    Raises:
        RuntimeError: If it would.
    """
    for argument, given in zip(arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(given) if writes else ():
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                raise RuntimeError("it changes a tensor in place that the module doesn't hold")


def _alike(leaf: Any, place: Pretended | None) -> Any:
    """A tensor that looks like a given one and has no values; other leaves as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = graph_leaf_on_meta(leaf, place)
    return nn.Parameter(found, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else found


def _own_alike(leaf: Any, place: Pretended) -> Any:
    """What the step may change: a tensor without values, or a copy of what isn't a constant."""
    if isinstance(leaf, (Tensor, *CONSTANTS)):
        return _alike(leaf, place)
    return copy.deepcopy(leaf)


def _step(module: pl.LightningModule, batch: Any, is_example: bool) -> Any:
    if not is_example and is_overridden("training_step", module):
        parameters = inspect.signature(module.training_step).parameters
        takes_index = len(parameters) > 1
        return module.training_step(*((batch, 0) if takes_index else (batch,)))
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*(batch if isinstance(batch, (tuple, list)) else (batch,)))


def _loss_of(returned: Any) -> Tensor | None:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    wanted = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if wanted else None
