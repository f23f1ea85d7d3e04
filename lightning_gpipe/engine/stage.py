"""The layers of this rank, and what a micro-batch does in them: forward, recompute, backward."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recompute must restore to draw the same random numbers and to round the same way.

    Args:
        key: Numbers that are the same on every stage and for every number of stages, and differ
            between calls.
        autocast: For each device type whether autocast is on, and its type.
        autocast_cache: Whether autocast keeps its casts.
        modes: Which of the stage's modules were in training.
        run_layer: How layers are run.
        default_dtype: The type of new tensors; Lightning's precision sets it for the step alone.
    """

    key: tuple[int, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    modes: tuple[bool, ...]
    run_layer: RunLayer
    default_dtype: torch.dtype

    @classmethod
    def current(
        cls,
        key: tuple[int, ...],
        device: torch.device,
        modes: tuple[bool, ...],
        run_layer: RunLayer,
    ) -> ForwardContext:
        """The setting of the running step."""
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        )
        cache = torch.is_autocast_cache_enabled()
        return cls(key, autocast, cache, modes, run_layer, torch.get_default_dtype())

    @contextmanager
    def restore_precision(self) -> Iterator[None]:
        """Autocast and the default type as they were in the forward."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            yield


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on this stage, between its forward and its backward.

    Args:
        output_requires_grad: For each output leaf whether it wants a gradient.
        input_requires_grad: The same for the input.
        stored: The input, kept for a recompute.
        versions: The versions of its tensors: they must not be changed before that.
        roots: Where the backward of each output leaf that wants a gradient begins.
        input_gradients: Filled by the backward: a gradient or None for each input leaf that wants
            one.
    """

    output_requires_grad: list[bool]
    input_requires_grad: list[bool]
    stored: Tree | None = None
    versions: list[int] = field(default_factory=list)
    roots: list[GradientEdge] | None = None
    input_gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def needs_backward(self) -> bool:
        """Whether anything on this stage or before it wants a gradient."""
        return any(self.output_requires_grad)


class Stage:
    """Runs the layers of one rank.

    Layers draw their random numbers from a generator that is seeded for (call, micro-batch, layer),
    so that they are the same for every number of stages and again in the recompute. Python's and
    NumPy's generators are not covered.

    Args:
        layers: The layers by their index in the backbone, in order.
        device: Where they are.
        deferred_batch_norm: Whether batch-norm statistics move once per mini-batch.
        across: The object channel over the replicas.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        device: torch.device,
        deferred_batch_norm: bool,
        across: ObjectChannel,
    ) -> None:
        self.layers = dict(layers)
        self.device = device
        unique = {
            id(module): module for layer in self.layers.values() for module in layer.modules()
        }
        self.batch_norm = DeferredBatchNorm(unique.values(), deferred_batch_norm, across)
        self._parameters = [p for layer in self.layers.values() for p in layer.parameters()]
        self._modules = list(unique.values())

    def forward(
        self,
        m: int,
        inputs: Tree,
        requires_grad: list[bool],
        keep_graph: bool,
        setting: ForwardContext,
    ) -> tuple[Tree, MicroBatch]:
        """Run a micro-batch forward.

        With gradients enabled this always builds the graph, so that a layer takes the same kernels
        as in the recompute and the outputs tell which of them want a gradient; where the graph
        isn't kept, it saves no activations.

        Args:
            m: The micro-batch.
            inputs: Tensors ``[n, …]`` without a graph. They stay as they are, even if the first
                layer works in place.
            requires_grad: For each input leaf whether it wants a gradient.
            keep_graph: Whether the activations are kept; otherwise the input is.
            setting: The step's setting; must be in force.

        Returns:
            The output, without a graph, and the record that :meth:`recompute` and :meth:`backward`
            need.
        """
        if not torch.is_grad_enabled():
            with self.batch_norm.micro_batch(recompute=False):
                copies = inputs.with_leaves(list(map(_copied, inputs.leaves)))
                outputs = self._run(m, copies, setting)
            return outputs.detached(), MicroBatch([False] * len(outputs.leaves), requires_grad)
        record = MicroBatch([], requires_grad)
        with ExitStack() as stack:
            if not keep_graph:
                stack.enter_context(saved_tensors_hooks(_drop, _dropped))
            stack.enter_context(self.batch_norm.micro_batch(recompute=False))
            outputs = self._run(m, _entered(inputs, record), setting)
        record.output_requires_grad = [
            isinstance(t, Tensor) and t.requires_grad for t in outputs.leaves
        ]
        if record.needs_backward:
            if keep_graph:
                record.roots = _roots(outputs)
            else:
                record.stored, record.versions = inputs, _versions(inputs)
        return outputs.detached(), record

    def recompute(
        self, m: int, record: MicroBatch, setting: ForwardContext, keep_input: bool
    ) -> None:
        """Run a micro-batch forward again, keeping its activations, where a gradient is wanted.

        Args:
            m: The micro-batch.
            record: What :meth:`forward` returned.
            setting: The forward's setting, restored here.
            keep_input: Whether the input is needed once more, for a second backward.
        """
        if record.stored is None:
            return
        if record.versions != _versions(record.stored):
            raise RuntimeError(
                "The backbone's input was changed in place between its forward and its backward, so"
                " the recomputed activations would be wrong. Change a clone of it."
            )
        with (
            torch.enable_grad(),
            setting.restore_precision(),
            self._as_in(setting),
            self.batch_norm.micro_batch(True),
        ):
            inputs = _entered(record.stored, record)
            if not keep_input:
                record.stored = None
            record.roots = _roots(self._run(m, inputs, setting))

    def backward(
        self,
        record: MicroBatch,
        gradients: Sequence[Tensor | None],
        retain: bool,
        also: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Run a micro-batch backward, adding to the parameters' gradients.

        Args:
            record: What :meth:`forward` returned.
            gradients: The gradient of each output leaf that wants one; None where the loss doesn't
                reach it.
            retain: Whether the graph is needed once more.
            also: A scalar to run the same backward from.

        Returns:
            The gradient of each input leaf that wants one, with the strides that autograd gave it.
        """
        roots, wanted = record.roots or [], sum(record.input_requires_grad)
        record.input_gradients[:] = [None] * wanted
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, gradients, strict=True)
            if gradient is not None
        ]
        if also is not None:
            pairs.append((get_gradient_edge(also), torch.ones_like(also)))
        if not retain or record.stored is not None:
            record.roots = None
        if pairs:
            edges, given = zip(*pairs, strict=True)
            torch.autograd.backward(edges, given, retain_graph=retain and record.stored is None)
        input_gradients = list(record.input_gradients)
        record.input_gradients.clear()
        return input_gradients

    def modes(self) -> tuple[bool, ...]:
        """Which of the stage's modules are in training."""
        return tuple(module.training for module in self._modules)

    def parameter_versions(self) -> list[int]:
        """Counters that move when a parameter is changed in place."""
        return [p._version for p in self._parameters]

    @contextmanager
    def random_state(self) -> Iterator[None]:
        """Put the generators back at the end: the code around sees one stream on every stage."""
        host = torch.get_rng_state()
        device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if device is not None:
                torch.cuda.set_rng_state(device, self.device)

    def _run(self, m: int, inputs: Tree, setting: ForwardContext) -> Tree:
        value: Any = inputs.value()
        for index, layer in self.layers.items():
            self._seed(*setting.key, m, index)
            try:
                value = setting.run_layer(index, layer, value)
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(
                        f"In layer {index} ({type(layer).__name__}) of the backbone, micro-batch"
                        f" {m}."
                    )
                raise
        return Tree.of(value, f"The output of layer {next(reversed(self.layers))} of the backbone")

    def _seed(self, *key: int) -> None:
        digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    @contextmanager
    def _as_in(self, setting: ForwardContext) -> Iterator[None]:
        """Put the modules in the modes of the forward, on copies of the buffers that they may move.

        Floating-point buffers and small ones are copied whether they moved or not: a fused kernel,
        such as batch norm's, moves them without a trace.
        """
        modes = self.modes()
        kept = [(m, dict(m._buffers)) for m in self._modules]
        for (module, buffers), training in zip(kept, setting.modes, strict=True):
            module.training = training
            if training:
                module._buffers.update(
                    {
                        name: buffer.clone()
                        for name, buffer in buffers.items()
                        if buffer is not None
                        and (buffer.is_floating_point() or buffer.numel() < 64)
                    }
                )
        try:
            yield
        finally:
            for (module, buffers), training in zip(kept, modes, strict=True):
                module.training = training
                module._buffers.update(buffers)


class _Entry(torch.autograd.Function):
    """Copies a micro-batch's input, and catches its gradient as autograd made it.

    A copy, because a layer may work in place; and not a leaf's ``.grad``, because that has other
    strides.
    """

    @staticmethod
    def forward(ctx: Any, sink: list[Tensor | None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        return tuple(map(strides.copy, inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.sink[:] = gradients
        return (None,) * (1 + len(gradients))


def _entered(inputs: Tree, record: MicroBatch) -> Tree:
    """The input as the layers get it: copies, with a graph where a gradient is wanted."""
    flags = record.input_requires_grad
    leaves = [t if wants else _copied(t) for t, wants in zip(inputs.leaves, flags, strict=True)]
    wanted = [i for i, wants in enumerate(flags) if wants]
    if wanted:
        heads = _Entry.apply(
            record.input_gradients, *(leaves[i].detach().requires_grad_() for i in wanted)
        )
        for i, head in zip(wanted, heads, strict=True):
            leaves[i] = head
    return inputs.with_leaves(leaves)


def _copied(leaf: Any) -> Any:
    return strides.copy(leaf) if isinstance(leaf, Tensor) else leaf


def _versions(tree: Tree) -> list[int]:
    """Counters that move when the tensors are changed in place."""
    return [0 if t.is_inference() else t._version for t in tree.tensors()]


def _roots(outputs: Tree) -> list[GradientEdge]:
    """Where the backward begins. The outputs themselves needn't be kept for it."""
    return [get_gradient_edge(t) for t in outputs.tensors() if t.requires_grad]


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(_: Any) -> Tensor:
    raise RuntimeError(
        "A backward ran through a forward whose activations were not kept; it must be recomputed"
        " first."
    )
