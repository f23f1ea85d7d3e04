"""The layers of one stage, and what a micro-batch does in them: forward, recompute, backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import KeyPath

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.engine.attributes import LayerAttributes, States
from lightning_gpipe.engine.autograd import no_values
from lightning_gpipe.engine.batch_statistics import Seen
from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.engine.buffers import CallBuffers, LayerBuffers
from lightning_gpipe.engine.carried import CarriedStates
from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.first_data import FirstData
from lightning_gpipe.engine.injected import InjectedGradients
from lightning_gpipe.engine.layer_hooks import Hooks, LayerHooks
from lightning_gpipe.engine.micro_batch import Gradients, HandOn, MicroBatch
from lightning_gpipe.engine.mixing import Mixing
from lightning_gpipe.engine.randomness import LayerRandomness, Seeding, seed_of
from lightning_gpipe.engine.reproduced import Reproduced, sums
from lightning_gpipe.engine.writes import ParameterWrites
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.tensors.tree import Tree


class _Met(NamedTuple):
    """What a forward has met and left.

    Args:
        attributes: What layers keep in attributes.
        hooks: Those around their forwards.
        variables: The context variables.
    """

    attributes: States
    hooks: Hooks
    variables: Context


@dataclass(slots=True)
class StageCall:
    """One call of the backbone on a stage.

    Args:
        context: What surrounds the forward.
        modes: Which of the stage's modules were in training.
        sizes: Samples in each micro-batch.
        seed: Of its random numbers.
        seeding: Before which layers Python's and NumPy's generators are seeded.
        buffers: The layers' buffers; None where nothing needs to be known of them.
        statistics: What batch norm sees in the backwards.
        met: What each micro-batch's forward has met, beside weights and buffers.
        sums: Those of its output, where the recompute's are compared.
        micro_batches: Those that were forwarded, until nothing is needed of them any more.
        parameter_versions: Counters that move when a parameter is changed in place, as the forward
            left them.
        written: Parameters, by their number, that forwards have changed.
        overwritten: Tensors of an input that others use, by their number, that layers change in
            place.
        replaced: Where the first layers have put something into the input's lists or dictionaries.
    """

    context: ForwardContext
    modes: tuple[bool, ...]
    sizes: tuple[int, ...]
    seed: int
    seeding: Seeding
    buffers: CallBuffers | None
    statistics: Seen
    met: dict[int, _Met] = field(default_factory=dict)
    sums: dict[int, list[Tensor]] | None = None
    micro_batches: dict[int, MicroBatch] = field(default_factory=dict)
    parameter_versions: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    overwritten: set[int] = field(default_factory=set)
    replaced: list[KeyPath] = field(default_factory=list)

    @property
    def count(self) -> int:
        """M."""
        return len(self.sizes)


class Stage:
    """Runs the layers of one stage.

    Layers draw their random numbers from generators that are seeded for (call, micro-batch, layer),
    so that they are the same for every number of stages and again in the recompute.

    Args:
        layers: The layers by their index in the backbone, in order.
        device: Where they are.
        deferred_batch_norm: Whether batch-norm statistics move once per mini-batch.
        across: The object channel over the replicas.
        watched: Surrounds every forward.
        is_alone: Whether these are all layers of the pipeline.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        device: torch.device,
        deferred_batch_norm: bool,
        across: ObjectChannel | None,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_alone: bool = False,
    ) -> None:
        self._layers = dict(layers)
        unique = {
            id(module): module for layer in self._layers.values() for module in layer.modules()
        }
        self._modules = list(unique.values())
        self._parameters = [p for layer in self._layers.values() for p in layer.parameters()]
        self._writes, self._first_data = ParameterWrites(self._parameters), FirstData(self._layers)
        self._batch_norm = DeferredBatchNorm(self._modules, deferred_batch_norm, across)
        self._buffers = LayerBuffers(self._modules)
        self._attributes = LayerAttributes([*self._layers.values()])
        self._hooks = LayerHooks(self._modules)
        self._reproduced, self._injected = Reproduced([*self._layers]), InjectedGradients()
        self._randomness = LayerRandomness(self._layers, device, is_alone)
        self._mixing = Mixing(self._layers, device, self._randomness)
        self._carried = CarriedStates(self._layers)
        self._watched, self._is_alone = watched, is_alone
        self._output_name = f"The output of layer {max(self._layers, default=0)} of the backbone"
        #: Random generators that layers hold.
        self.generators = self._randomness.own
        #: Whether a backward of the input alone took as much as a whole one.
        self.cannot_split = False

    def close(self) -> None:
        """Let go of the layers."""
        self._batch_norm.remove()

    def begin(
        self, context: ForwardContext, sizes: Sequence[int], is_once: bool = False
    ) -> StageCall:
        """Begin a call of the backbone; collective over the replicas where SyncBatchNorm trains.

        Args:
            context: What surrounds the forward; must be in force.
            sizes: Samples in each micro-batch.
            is_once: Whether the activations of all micro-batches are kept.
        """
        statistics = self._batch_norm.begin(sizes)
        modes = self._modes()
        seeding, seed = self._randomness.begin(modes, is_once), seed_of(*context.key)
        buffers = self._buffers.begin(modes)
        call = StageCall(context, modes, tuple(sizes), seed, seeding, buffers, statistics)
        call.sums = None if is_once else self._reproduced.begin()
        return call

    def end_forward(self, call: StageCall) -> None:
        """End the forward part of a call, once all its micro-batches are forwarded."""
        call.parameter_versions = self._writes.versions()
        self._batch_norm.finish()

    def has_changed(self, call: StageCall) -> bool:
        """Whether a parameter was changed since the forward part of a call."""
        return call.parameter_versions != self._writes.versions()

    def forward(
        self,
        call: StageCall,
        m: int,
        inputs: Tree,
        requires_grad: list[bool],
        keep_graph: bool,
        is_own: bool = False,
    ) -> Tree:
        """Run a micro-batch forward.

        With gradients enabled this always builds the graph, so that a layer takes the same kernels
        as in the recompute and the outputs tell which of them want a gradient; where the graph
        isn't kept, it saves no activations.

        Args:
            call: The call of the backbone; gets the record that :meth:`recompute` and
                :meth:`backward` need.
            m: The micro-batch.
            inputs: Tensors ``[n, …]`` without a graph.
            requires_grad: For each input leaf whether it wants a gradient.
            keep_graph: Whether the activations are kept; otherwise the input is.
            is_own: Whether nobody else uses the input's memory; else it stays as it is.

        Returns:
            The output, without a graph.
        """
        trains = torch.is_grad_enabled()
        drops = trains and not keep_graph
        looked_at = self._mixing.kept(inputs, m, call.sizes)
        # nothing is split: layers may do with the batch what they do without a pipeline
        is_lent = self._is_alone and call.count == 1 and not drops
        record = call.micro_batches[m] = MicroBatch(requires_grad, is_own, is_lent)
        if drops:
            call.met[m] = _Met(self._attributes.met(), self._hooks.met(), copy_context())
        with (
            self._writes.noted(call.written) if drops else nullcontext(),
            saved_tensors_hooks(_drop, _dropped) if drops else nullcontext(),
            self._buffers.forward(call.buffers, call.modes, m, call.count, keep_graph),
            self._watched(),  # around batch norm's, whose traces are gone then
            self._batch_norm.micro_batch(recompute=False),
            self._first_data.watched(m, call.count),
            self._carried.watched(m, call.sizes),
        ):
            enter = record.enter_for_now if drops else record.enter if trains else record.lent
            given = enter(inputs)
            before, counts = _marks(given), [] if is_own else given.versions()
            outputs = self._run(m, given, call, is_once=keep_graph)
            call.overwritten |= _moved(counts, given)
            if before and _marks(given) != before:
                raise RuntimeError(_CHANGED_IN_COMMON)
        if drops:
            attributes, around, variables = call.met[m]
            kept = self._attributes.kept(attributes), self._hooks.kept(around)
            call.met[m] = _Met(*kept, variables)
            if call.sums is not None:
                call.sums[m] = sums(outputs)
        record.end_forward(inputs, outputs, keep_graph)
        if looked_at is not None:
            self._mixing.look(looked_at, m, call.sizes, call.seed, call.context)
        return outputs.detached()

    def recompute(self, call: StageCall, m: int, keep_input: bool) -> None:
        """Run a micro-batch forward again, keeping its activations, where a gradient is wanted.

        Args:
            call: The call of the backbone.
            m: The micro-batch.
            keep_input: Whether the input is needed once more, for a second backward.
        """
        record = call.micro_batches[m]
        if record.stored is None:
            return
        met = call.met[m] if keep_input else call.met.pop(m)
        with (
            self._writes.refused(call.written),
            torch.enable_grad(),
            call.context.restored(),
            _in_modes(self._modules, call.modes),
            self._buffers.recompute(call.buffers, m, once_more=keep_input),
            self._attributes.restored(met.attributes),
            self._hooks.restored(met.hooks),
            self._watched(),
            self._batch_norm.micro_batch(recompute=True),
        ):
            given = record.enter_again(keep_input)
            run = partial(self._run, m, given, call, is_once=False)
            outputs = met.variables.copy().run(run)
            if call.sums is not None:
                self._reproduced.compare(call.sums[m], outputs)
            record.end_recompute(outputs)

    def backward(
        self,
        call: StageCall,
        m: int,
        gradients: Gradients,
        retain: bool,
        hand_on: HandOn,
        also: Tensor | None = None,
    ) -> None:
        """Run a micro-batch backward, adding to the parameters' gradients.

        Args:
            call: The call of the backbone.
            m: The micro-batch.
            gradients: The gradient of each output leaf that wants one; None where the loss doesn't
                reach it.
            retain: Whether the graph is needed once more.
            hand_on: Takes the gradient of each input leaf that wants one, with the strides that
                autograd gave it; not called where none does. Called as soon as the gradient is
                there, while the reducer of the replicas may still be at work.
            also: A scalar to run the same backward from.
        """
        with self._batch_norm.backward(call.statistics):
            self._injected.look(call.micro_batches[m].roots or (), gradients, call.count)
            call.micro_batches[m].backward(gradients, retain, hand_on, also)

    def backward_input(
        self, call: StageCall, m: int, gradients: Gradients, hand_on: HandOn
    ) -> None:
        """Run the first half of a micro-batch's backward: see :meth:`backward`."""
        weights = [p for p in self._parameters if p.requires_grad]
        with self._batch_norm.backward(call.statistics):
            self._injected.look(call.micro_batches[m].roots or (), gradients, call.count)
            was_split = call.micro_batches[m].backward_input(gradients, hand_on, weights)
        self.cannot_split = self.cannot_split or not was_split

    def backward_weights(self, call: StageCall, m: int) -> None:
        """Run the second half of a micro-batch's backward, adding to the parameters' gradients."""
        with self._batch_norm.micro_batch(recompute=True):
            call.micro_batches[m].backward_weights()

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)

    def _run(self, m: int, inputs: Tree, call: StageCall, is_once: bool) -> Tree:
        given = value = inputs.value()
        run_layer, randomness = call.context.run_layer, self._randomness
        seeded, is_late = call.seeding.before, call.seeding.is_late
        looks = m == call.count - 1 and call.seeding.looks
        base = randomness.begin_micro_batch(call.seed, m, looks or not is_once)
        try:
            for index, layer in self._layers.items():
                randomness.seed(base, index, index in seeded)
                value = run_layer(index, layer, value)
                if index in seeded:
                    randomness.look_at_layer(base, index, is_late)
        except Exception as error:
            if "support saved tensor hooks" in str(error):  # torch.func's
                raise RuntimeError(f"{error} {_KEEP_ALL}") from error
            where = f"layer {index} ({type(layer).__name__}) of the backbone"
            hint = _SPLIT if isinstance(error, IndexError) else ""
            add_note(error, f"In {where}, micro-batch {m}.{hint}")
            raise
        if looks:
            randomness.look_at_all(base)
        output = Tree.of(value, self._output_name)
        if m == 0 and 0 in self._layers:
            call.replaced = inputs.replaced_in(given)
        if m == 0 and (problem := no_values(self._output_name, output.tensors())) is not None:
            raise RuntimeError(problem)
        return output


@contextmanager
def _in_modes(modules: Sequence[nn.Module], modes: tuple[bool, ...]) -> Iterator[None]:
    """Put modules in the modes of the forward."""
    before = tuple(module.training for module in modules)
    if before == modes:
        yield
        return
    try:
        _set_modes(modules, modes)
        yield
    finally:
        _set_modes(modules, before)


def _set_modes(modules: Sequence[nn.Module], modes: tuple[bool, ...]) -> None:
    for module, training in zip(modules, modes, strict=True):
        module.training = training


_CHANGED_IN_COMMON = (
    "A layer changed a tensor in place that shares memory with another one beside it, such as a"
    " view of it. Between stages they are sent by themselves, so the other one would not change"
    " with it. Change a clone."
)


def _moved(counts: list[int], tree: Tree) -> set[int]:
    """The tensors whose versions aren't what they were, by their number."""
    if not counts or counts == (now := tree.versions()):
        return set()
    return {i for i, count in enumerate(now) if count != counts[i]}


def _marks(inputs: Tree) -> list[Any]:
    """What tells that a leaf was changed in place that shares memory with another, elsewhere."""
    if not inputs.in_common:
        return []
    leaves = [inputs.leaves[i] for i in inputs.in_common]
    return [leaf.tolist() if leaf.is_inference() else leaf._version for leaf in leaves]


_SPLIT = (
    " Layers get micro-batches: indices of rows of the mini-batch, such as a graph's edges, don't"
    " fit them."
)
_KEEP_ALL = (
    "The forward of a micro-batch whose activations are re-materialized keeps none of them, so"
    " that isn't possible: use GPipeStrategy(checkpoint='never')."
)


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(_: Any) -> Tensor:
    raise RuntimeError(f"A layer computes a gradient in its forward. {_KEEP_ALL}")
