"""Plans pipelines of a LightningModule, before there is a Trainer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.model.backbone import find_backbone
from lightning_gpipe.model.on_meta import Attributes, Pretended, to_meta_leaf
from lightning_gpipe.model.parameters import layers_of
from lightning_gpipe.model.redirect import Redirections
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.pipeline.probe import Reached
from lightning_gpipe.plan.balance import known_flops
from lightning_gpipe.plan.planner import Choices, Planner
from lightning_gpipe.plan.plans import Plans
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.strategy.saving_strategy import SavingStrategy
from lightning_gpipe.tensors.random_state import preserved

_GIVE_INPUT = "give what the backbone is called with: plan(module, input=...)"


class PlanningStrategy(SavingStrategy):
    """A strategy that plans pipelines."""

    def plan(
        self,
        module: pl.LightningModule,
        batch: Any = None,
        *,
        input: Any = None,
        devices: int,
        memory: int | str | None = None,
        stages: Sequence[int] | None = None,
        chunks: Sequence[int] | None = None,
        virtual_stages: Sequence[int] | None = None,
        checkpoint: Sequence[Checkpoint] | None = None,
        optimizers: Sequence[Optimizer] | None = None,
        device: torch.device | str | None = None,
        flops: float | None = None,
    ) -> Plans:
        """Tell what fits and what is fastest, without data, weights or devices.

        The module's ``training_step`` runs up to the backbone's call on tensors without values. The
        module may be unbuilt, or built on the meta device, and is left as it was. What isn't given
        is as this strategy says; where that says ``"auto"``, and of recomputes and virtual stages
        where it says what is the default, several are compared.

        Args:
            module: The module.
            batch: What ``training_step`` is given by one replica's data loader: tensors of any
                device, the meta device too. ``None``: its ``example_input_array``, with which
                ``forward`` is called.
            input: What the backbone is called with, in place of a batch.
            devices: Their number, for stages and replicas.
            memory: Of a device, as ``"16GB"``; ``None``: the strategy's ``memory_limit``.
            stages: The K that are compared.
            chunks: The M.
            virtual_stages: The V.
            checkpoint: What is re-materialized.
            optimizers: That will step; ``None``: those of ``configure_optimizers``.
            device: Whose kernels layers will run; ``None``: this machine's accelerator, or the CPU.
            flops: Operations that a device does in a second, to tell seconds.

        Returns:
            All layouts, the best first; ``.best`` is the fastest that fits, and a printed plan is a
            table.

        Raises:
            ValueError: If the module can't be cut, or the step needs values, with what to do.
            UntraceableLayer: If a layer of the backbone needs the values of its input.
        """
        settings = self._settings
        if memory is not None:
            settings = replace(settings, memory_limit=memory)
        given: dict[str, Any] = {
            "stages": stages,
            "chunks": chunks,
            "virtual_stages": virtual_stages,
            "checkpoint": checkpoint,
        }
        choices = replace(
            Choices.around(settings, devices), **{k: tuple(v) for k, v in given.items() if v}
        )
        place = torch.device(device) if device is not None else _accelerator()
        with (
            warnings.catch_warnings(),
            preserved(torch.device("cpu")),
            _built(module),
            self.precision_plugin.forward_context(),
        ):
            warnings.simplefilter("ignore")  # the run's own will warn
            planner = _planner(module, settings, batch, input, optimizers, place, flops)
            said: dict[str, None] = {}
            plans = planner.compare(
                choices, settings, devices, lambda text: said.update({text: None})
            )
        for text in said:
            rank_zero_warn(text)
        return plans


def _planner(
    module: pl.LightningModule,
    settings: Settings,
    batch: Any,
    input: Any,
    optimizers: Sequence[Optimizer] | None,
    device: torch.device,
    flops: float | None,
) -> Planner:
    name = settings.backbone
    name = find_backbone(module, name, known_flops(module) if name is None else None)
    layers, run = tuple(layers_of(module.get_submodule(name))), cast(RunLayer, run_layer)
    is_detached = settings.step == "micro-batch"
    if input is None:
        input, run = _input_of(module, name, batch, device)
        if is_detached:
            input = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, input)
    if optimizers is None:
        optimizers = _optimizers_of(module)
    return Planner(module, name, layers, run, input, optimizers, device, is_detached, flops)


def _accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


@contextmanager
def _built(module: pl.LightningModule) -> Iterator[None]:
    """Let a module have its layers inside, on the meta device, if it has not; then be as before."""
    kept = [(part, Attributes(part)) for part in module.modules()]
    try:
        if is_overridden("configure_model", module):
            try:
                with torch.device("meta"):
                    module.configure_model()
            except Exception as error:
                raise ValueError(
                    "configure_model() can't run on the meta device, where tensors have no values"
                    f" ({type(error).__name__}: {error}): call it before the plan is made."
                ) from error
        yield
    finally:
        for part, attributes in kept:
            attributes.restore(part)


def _input_of(
    module: pl.LightningModule, backbone: str, batch: Any, device: torch.device
) -> tuple[Any, RunLayer]:
    """What a step calls the backbone with, on the meta device, and how its layers are run.

    Args:
        module: The module.
        backbone: Dotted name of its backbone.
        batch: What the step is given; None: the module's example is given to its forward.
        device: For which device tensors pass.
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
    sample = tree_map(lambda leaf: _alike(leaf, None), found.sample)
    return sample, found.context.run_layer


def _reached(
    module: pl.LightningModule,
    backbone: str,
    batch: Any,
    is_example: bool,
    device: torch.device,
) -> Reached | None:
    """Run a step on tensors without values until it calls the backbone; None: it doesn't."""
    body, redirections = module.get_submodule(backbone), Redirections(is_alone=False)
    place = Pretended(device)

    def reached(input: Any, run: RunLayer = run_layer) -> Any:
        raise Reached(input, ForwardContext.current((), device, run))

    kept = [(part, Attributes(part)) for part in module.modules()]
    try:
        redirections.take_over(body)
        redirections.add(body, reached)
        _pretend(module, kept, place)
        given = tree_map(lambda leaf: _alike(leaf, place), batch)
        with torch.enable_grad(), place.mode:
            _step(module, given, is_example)
    except Reached as found:
        return found
    finally:
        redirections.end()
        for part, attributes in kept:
            attributes.restore(part)
    return None


def _pretend(
    module: nn.Module, kept: Sequence[tuple[nn.Module, Attributes]], place: Pretended
) -> None:
    """Put tensors without values in the places of a module's."""
    known: dict[int, Any] = {}
    for part, attributes in kept:
        attributes.prepare(part, True, None, place)
        for entries in (part._parameters, part._buffers):
            for name, tensor in entries.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        known[id(tensor)] = _alike(tensor, place)
                    entries[name] = known[id(tensor)]


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


def _optimizers_of(module: pl.LightningModule) -> list[Optimizer] | None:
    """The optimizers that a module configures; None: it can't tell without a Trainer."""
    if not is_overridden("configure_optimizers", module):
        return None
    try:
        found = list(_found(module.configure_optimizers()))
    except Exception:
        return None
    return found or None


def _found(value: Any) -> Iterator[Optimizer]:
    """Optimizers, in all forms in which ``configure_optimizers`` may return them."""
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from _found(value.get("optimizer"))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _found(entry)
