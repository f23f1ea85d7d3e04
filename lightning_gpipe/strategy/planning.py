"""Plans pipelines of a LightningModule, before there is a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from numbers import Real
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from lightning_gpipe.failure.reason import line_of
from lightning_gpipe.model.backbone import find_backbone
from lightning_gpipe.model.on_meta import Attributes, UntraceableLayer
from lightning_gpipe.model.own_state import own_state_kept
from lightning_gpipe.model.parameters import layers_of, trained_by
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.balance import known_flops
from lightning_gpipe.plan.cost import LayerCost
from lightning_gpipe.plan.planner import Choices, Planner
from lightning_gpipe.plan.plans import Plans
from lightning_gpipe.plan.settings import Settings, check_flag, is_count, memory_size
from lightning_gpipe.plan.timing import layer_times
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.strategy.pretended_step import BackboneCall, call_of
from lightning_gpipe.strategy.saving_strategy import SavingStrategy
from lightning_gpipe.tensors.random_state import preserved


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
        checkpoint: Sequence[Checkpoint | Literal["auto"]] | None = None,
        optimizers: Sequence[Optimizer] | None = None,
        device: torch.device | str | None = None,
        flops: float | None = None,
        measured: bool = False,
    ) -> Plans:
        """Tell what fits and what is fastest, without data, weights or devices.

        The module's ``training_step`` runs on tensors without values, up to the backbone's call at
        least. The module may be unbuilt, or built on the meta device, and is left as it was. What
        isn't given is as this strategy says; where that says ``"auto"``, and of recomputes and
        virtual stages where it says what is the default, several are compared.

        Args:
            module: The module.
            batch: What one replica's data loader gives, before the module's hooks change it, such
                as ``on_after_batch_transfer``: tensors of any device, the meta device too.
                ``None``: its ``example_input_array``, with which ``forward`` is called.
            input: What the backbone is called with, in place of a batch.
            devices: Their number, for stages and replicas.
            memory: Of a device, as ``"16GB"``; ``None``: the strategy's ``memory_limit``.
            stages: The K that are compared.
            chunks: The M.
            virtual_stages: The V.
            checkpoint: What is re-materialized; ``"auto"``: as little as fits.
            optimizers: That will step; ``None``: those of ``configure_optimizers``.
            device: Whose kernels layers will run; ``None``: this machine's accelerator, or the CPU.
            flops: Operations that a device does in a second, to tell seconds.
            measured: Whether every layer runs by itself on ``device``, to tell seconds by what it
                takes.

        Returns:
            All layouts, the best first; ``.best`` is the fastest that fits, and a printed plan is a
            table.

        Raises:
            ValueError: If an argument has a wrong value, the module can't be cut, or the step
                needs values, with what to do.
            UntraceableLayer: If a layer of the backbone fails for the batch, or needs its values.
        """
        if not isinstance(module, pl.LightningModule):
            raise ValueError(
                "module must be an object of a LightningModule of `lightning`, got one of"
                f" {type(module).__name__}."
            )
        if not is_count(devices):
            raise ValueError(f"devices must be a whole number from 1, got devices={devices!r}.")
        if flops is not None:
            is_rate = isinstance(flops, Real) and not isinstance(flops, bool)
            if not (is_rate and 0 < flops < inf):
                raise ValueError(
                    f"flops must be operations in a second, above 0, got flops={flops!r}."
                )
        check_flag("measured", measured)
        if batch is not None and input is not None:
            raise ValueError("batch and input are both given: input takes the place of a batch.")
        settings = self._settings
        if memory is not None:
            settings = replace(settings, memory_limit=memory_size("memory", memory))
        given: dict[str, Any] = {
            "stages": stages,
            "chunks": chunks,
            "virtual_stages": virtual_stages,
            "checkpoint": checkpoint,
        }
        chosen = {name: values for name, values in given.items() if values is not None}
        choices = replace(Choices.around(settings, devices), **chosen)
        place = _accelerator() if device is None else _pretendable(_device(device))
        batch, input = map(self.precision_plugin.convert_input, (batch, input))
        with (
            warnings.catch_warnings(),
            preserved(torch.device("cpu")),
            own_state_kept(module, everything=True),
            _built(module, self.precision_plugin),
            self.precision_plugin.forward_context(),
            _autocast_for(place),
        ):
            warnings.simplefilter("ignore")  # the run's own will warn
            said: dict[str, None] = {}
            planner = _planner(
                *(module, settings, batch, input, optimizers, place, flops, measured),
                warn=lambda text: said.update({text: None}),
            )
            with _layers_told(planner):
                plans = planner.compare(choices, settings, devices)
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
    is_measured: bool,
    warn: Callable[[str], object],
) -> Planner:
    name = settings.backbone
    name = find_backbone(module, name, known_flops(module) if name is None else None)
    layers = tuple(layers_of(module.get_submodule(name)))
    is_detached = settings.step == "micro-batch"
    if optimizers is None:
        optimizers = _optimizers_of(module)
    else:
        _check_parameters(optimizers, module)
    call = BackboneCall(input, run_layer, context=None, seen=None)
    if input is None:
        call = call_of(module, name, batch, device, optimizers)
    sample = call.input
    if is_detached:
        sample = tree_map_only(Tensor, Tensor.detach, sample)
    return Planner(
        *(module, name, layers, call.run_layer, sample, optimizers, device, warn, is_detached),
        *(call.seen, flops),
        partial(_measured, layers, call, device) if is_measured else None,
    )


@contextmanager
def _layers_told(planner: Planner) -> Iterator[None]:
    """Tell of an error of a layer that it is the layer's, and where it arose."""
    try:
        yield
    except UntraceableLayer as error:
        layer = type(planner.layers[error.index]).__name__
        raise UntraceableLayer(
            f"Layer {error.index} of '{planner.backbone}' ({layer}) raised an error for this batch:"
            f" {line_of(error.__cause__ or error)}. It was given the batch's shapes without values:"
            " if it needs values, it can't be planned.",
            error.index,
        ) from error


def _measured(
    layers: Sequence[nn.Module], call: BackboneCall, device: torch.device, chunks: int
) -> list[LayerCost]:
    """What layers take on a device, for inputs with other values."""
    if any(tensor.is_meta for layer in layers for tensor in layer.parameters()):
        raise ValueError(
            "Layers on the meta device have no values, and can't be measured: build the module on"
            " the host, or plan without measuring."
        )

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        full = torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
        full = full.normal_() if leaf.is_floating_point() else full
        return full.requires_grad_(leaf.requires_grad)

    with nullcontext() if call.context is None else call.context.restored():
        return layer_times(
            *(layers, call.run_layer, tree_map(filled, call.input), chunks, device),
            trains=True,
            training=True,
        )


def _device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one of torch, as 'cuda', got device={name!r}.") from error
    if device.type == "meta":
        raise ValueError("device must be one that computes, as 'cuda', got device='meta'.")
    if device.type not in ("cpu", "cuda", _accelerator().type):  # asking ends the process
        raise ValueError(
            "Only a machine that has a device of this kind can tell what its kernels keep: give"
            f" 'cpu', 'cuda', or this machine's accelerator, got device={name!r}."
        )
    return device


@contextmanager
def _autocast_for(device: torch.device) -> Iterator[None]:
    """Let autocast be on for a device as for the Trainer's, which may be another one.

    For the CPU, too, which stands in for it in backwards. ``torch.autocast`` can't be on for GPUs
    where there are none.
    """
    kinds = dict.fromkeys((device.type, "cpu", "cuda"))
    before = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    wanted = [dtype for _, is_on, dtype in before if is_on][:1]
    try:
        for kind, dtype in product(kinds, wanted):
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        yield
    finally:
        for kind, is_on, dtype in before:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)


def _accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def _pretendable(device: torch.device) -> torch.device:
    """A device whose kernels can be asked for here: else PyTorch ends the process."""
    is_new = torch.__version__ >= "2.10" and torch.backends.cuda.is_built()
    if device.type != "cuda" or torch.cuda.is_available() or is_new:
        return device
    rank_zero_warn(
        f"The plan is of the CPU's kernels, not of {device.type}'s, which may keep other tensors:"
        f" without a GPU, torch {torch.__version__} can't tell what those do. Plan with torch 2.10"
        " or newer, built for CUDA."
    )
    return torch.device("cpu")


@contextmanager
def _built(module: pl.LightningModule, precision: Precision) -> Iterator[None]:
    """Let a module be as a run has it, built and in its precision; then be as before.

    Layers that it hasn't yet are on the meta device.
    """
    kept = Attributes(module.modules())
    try:
        if is_overridden("configure_model", module):
            try:
                with torch.device("meta"), precision.module_init_context():
                    module.configure_model()
            except Exception as error:
                raise ValueError(
                    "configure_model() can't run on the meta device, where tensors have no values"
                    f" ({line_of(error)}): call it before the plan is made."
                ) from error
        converted = next(precision.convert_module(nn.Linear(1, 1)).parameters())
        _convert(module, converted.dtype)
        yield
    finally:
        kept.restore()


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Put converted tensors in the places of a module's, as some precisions do."""
    if dtype == torch.get_default_dtype():
        return
    known: dict[int, Tensor] = {}
    for part in module.modules():
        held: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for entries in held:
            for name, tensor in entries.items():
                if tensor is not None and tensor.is_floating_point():
                    if id(tensor) not in known:
                        found = tensor.detach().to(dtype)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        known[id(tensor)] = (
                            nn.Parameter(found, tensor.requires_grad) if is_parameter else found
                        )
                    entries[name] = known[id(tensor)]


def _check_parameters(optimizers: Sequence[Optimizer], module: pl.LightningModule) -> None:
    """Refuse optimizers of other parameters than the module has as it is planned."""
    is_list = isinstance(optimizers, Sequence)
    if not is_list or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ValueError(f"optimizers must be a list of optimizers, got {optimizers!r}.")
    stepped = {id(p) for optimizer in optimizers for p in trained_by(optimizer)}
    if not stepped & {id(p) for p in module.parameters()}:
        raise ValueError(
            f"The optimizers step no parameter of {type(module).__name__} as a run has it, built"
            " and in its precision: let configure_optimizers return them."
        )


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
