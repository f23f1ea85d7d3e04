"""What each layer of a backbone takes, measured on its device.

Each layer runs by itself, in a copy that is thrown away: when the cut is decided, all layers stand
in host memory, and the device may not hold them together.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.model.layer_state import layer_state_kept
from lightning_gpipe.model.on_meta import hooks_of_torch, without_replicas
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.chunks import micro_batch_of
from lightning_gpipe.plan.cost import LayerCost
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import Tree

#: Runs of a layer, and seconds for them, that a median is taken of.
_RUNS, _LEAST_S = 5, 0.02
#: Seconds after which a slow layer isn't run again.
_MOST_S = 0.5
#: Layers above which there are fewer seconds for each.
_LAYERS = 100


class UntimableLayer(RuntimeError):
    """A layer can't run by itself, in a copy."""


def layer_times(
    layers: Sequence[nn.Module],
    run_layer: RunLayer,
    sample: Any,
    chunks: int,
    device: torch.device,
    *,
    trains: bool,
    training: bool,
) -> list[LayerCost]:
    """Measure what a micro-batch takes in each layer, in seconds.

    Frozen layers take what their backward computes: nothing before the first trainable one, no
    gradient of weights behind it. It leaves no trace in the layers and in the generators.

    Args:
        layers: The layers, each with all its weights.
        run_layer: Runs one of them.
        sample: The input of the first layer, a pytree of tensors ``[batch, …]``; the first of its
            micro-batches is measured.
        chunks: M.
        device: Where layers compute; holds one of them at a time.
        trains: Whether there will be backwards.
        training: Whether all modules run in training mode; else in the modes that they are in.

    Raises:
        UntimableLayer: If a layer can't be copied, or fails.
    """
    times, share = [], min(1.0, _LAYERS / len(layers))
    with (
        preserved(device),
        layer_state_kept(layers),
        torch.inference_mode(False),
        torch.set_grad_enabled(trains),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the real calls warn
        batch = Tree.of(sample, "The backbone's input")
        try:
            first = micro_batch_of(batch, chunks, layers, run_layer)
        except ValueError as error:
            raise UntimableLayer(f"their input can't be split ({error})") from error
        given = first.mapped(Tensor.clone).mapped(_detached)
        for index, layer in enumerate(layers):
            try:
                own = _copied(layer, device, training)
                alone = _Alone(own, run_layer, index, device, given, given)
                times.append(_median_s(alone, share * _LEAST_S, share * _MOST_S))
                given = alone.output
            except Exception as error:
                raise UntimableLayer(
                    f"{type(layer).__name__} can't run by itself, in a copy"
                    f" ({type(error).__name__}: {error})"
                ) from error
    return times


@dataclass(slots=True)
class _Alone:
    """A layer that runs by itself.

    Args:
        layer: A copy that may be changed.
        run_layer: Runs it.
        index: Its place.
        device: Where it is.
        given: Its input; each tensor is a leaf of a graph.
        output: What it returned last, likewise.
    """

    layer: nn.Module
    run_layer: RunLayer
    index: int
    device: torch.device
    given: Tree
    output: Tree

    def __call__(self) -> LayerCost:
        """Run it once."""
        # copies, because a layer may work in place, and not on leaves of the graph
        value = self.given.mapped(Tensor.clone).value()
        begin = self._now()
        value = self.run_layer(self.index, self.layer, value)
        forward_s = self._now() - begin
        output = Tree.of(value, "A layer's output")
        self.output = output.mapped(_detached)
        roots = [t for t in output.tensors() if t.requires_grad]
        if not roots:
            return LayerCost(forward_s, 0.0, 0.0)
        gradients = list(map(torch.ones_like, roots))
        begin = self._now()
        torch.autograd.backward(roots, gradients)  # adds to the copy's gradients, as in the run
        return LayerCost(forward_s, self._now() - begin, forward_s)

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _median_s(run: Callable[[], LayerCost], least_s: float, most_s: float) -> LayerCost:
    run()  # memory is allocated, and kernels are chosen
    found: list[LayerCost] = []
    begin, spent = time.perf_counter(), 0.0
    while not found or (spent < most_s and (len(found) < _RUNS or spent < least_s)):
        found.append(run())
        spent = time.perf_counter() - begin
    kinds = zip(*((one.forward, one.backward, one.recompute) for one in found), strict=True)
    return LayerCost(*map(statistics.median, kinds))


def _detached(tensor: Tensor) -> Tensor:
    """A tensor as a leaf of the graph, where it wants a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(layer: nn.Module, device: torch.device, training: bool) -> nn.Module:
    """A copy of a layer on a device, without hooks of the user's and with nobody to talk to."""
    known: dict[int, Any] = {}  # stands in the copy for what must not be copied
    for part in layer.modules():
        for name, hooks in hooks_of_torch(part).items():
            known[id(getattr(part, name))] = hooks
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # computed in every forward
                known[id(value)] = value.detach().clone()
        if isinstance(part, nn.SyncBatchNorm):
            known[id(part.process_group)] = None
    alone = copy.deepcopy(layer, known).to(device)
    for part in alone.modules():
        part.training = part.training or training
        without_replicas(part)
    return alone
