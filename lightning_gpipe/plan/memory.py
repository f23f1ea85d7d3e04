"""What each layer of a backbone holds in a training step, in bytes, told without running it.

The layers run once on the meta device, as they do in training, on one micro-batch. What autograd
saves is noted by the memory that it stands in: layers that save the same tensor, as one its output
and the next its input, hold it once wherever they are on one stage. So these facts can be combined
for any cut; see :mod:`lightning_gpipe.plan.stage_memory`.

Not seen: what kernels keep for themselves (recurrent layers of cuDNN and oneDNN), and tensors that
a custom autograd function keeps as attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpipe.model.alike import Returned, signature
from lightning_gpipe.model.layer_state import state_kept_in_pass
from lightning_gpipe.model.on_meta import (
    Pretended,
    graph_leaf_on_meta,
    meta_tensors,
    run_layer_on_meta,
)
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.backward_memory import in_backward
from lightning_gpipe.plan.operations import Operations
from lightning_gpipe.tensors.tree import Tree

#: The last fields of :class:`LayerMemory`, and what comes before them.
_Rest: TypeAlias = tuple[int, int, int, int, int, int]
_Found: TypeAlias = tuple[dict[int, int], _Rest]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What there is of a parameter or buffer on a stage that holds it.

    Args:
        key: The same for the same tensor.
        nbytes: Of it.
        gradient: Bytes of its gradient.
        optimizer: Bytes of the optimizers' state; None: not known.
        copy: Bytes of the copy that a call of the backbone takes of a buffer, for the recomputes.
        is_buffer: Whether it is a buffer.
    """

    key: int
    nbytes: int
    gradient: int = 0
    optimizer: int | None = 0
    copy: int = 0
    is_buffer: bool = False

    def unused(self) -> HeldTensor:
        """The same, where no step uses it: it gets no gradient, and optimizers pass over it."""
        return replace(self, gradient=0, optimizer=0)


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses between two layers if they are on two stages, for one micro-batch.

    Args:
        nbytes: Of the tensors.
        gradient: Bytes of their gradients.
    """

    nbytes: int
    gradient: int


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What a layer holds.

    Args:
        tensors: Its parameters and buffers.
        input: What it is given.
        output: What it returns.
        output_saved: Bytes of that which autograd saved in the layer, too.
        saved: What autograd saves in its forward of one micro-batch, for its backward: for each
            piece of memory a number, the same for all layers that save it, and its bytes.
        forward: The most bytes that live within a forward that saves nothing, without its input.
        first_half: The most bytes that live in the first half of a split backward, less what was
            saved.
        arriving: Bytes of the gradients that a split backward keeps from its first half to its
            second.
        behind: How many of those saved last were saved behind the last use of a parameter: a split
            backward needs them in its first half alone.
        backward: The most bytes that live in its backward, less what was saved, with the gradient
            of its output as long as that is needed.
        last_backward: The same without the gradient of its output.
    """

    tensors: tuple[HeldTensor, ...]
    input: Boundary
    output: Boundary
    output_saved: int
    saved: Mapping[int, int]
    forward: int
    first_half: int
    arriving: int
    behind: int
    backward: int
    last_backward: int


def held_tensors(
    modules: Iterable[nn.Module], optimizer_bytes: Mapping[int, int] | None
) -> tuple[HeldTensor, ...]:
    """What there is of the parameters and buffers of modules, each once.

    Args:
        modules: The modules, without those inside them.
        optimizer_bytes: Bytes of optimizers' state by the ``id`` of the parameter; None: unknown.
    """
    found: dict[int, HeldTensor] = {}
    for module in modules:
        for p in module._parameters.values():
            if p is not None:
                state = None if optimizer_bytes is None else optimizer_bytes.get(id(p), 0)
                found[id(p)] = HeldTensor(id(p), p.nbytes, p.nbytes * p.requires_grad, state)
        for buffer in module._buffers.values():
            if buffer is not None:
                copied = buffer.nbytes * (not isinstance(module, _NormBase))
                held = HeldTensor(id(buffer), buffer.nbytes, copy=copied, is_buffer=True)
                found.setdefault(id(buffer), held)
    return tuple(found.values())


def layer_memories(
    layers: Sequence[nn.Module],
    run_layer: RunLayer,
    micro_batch: Any,
    optimizer_bytes: Mapping[int, int] | None = None,
    device: torch.device | None = None,
) -> tuple[LayerMemory, ...]:
    """What each layer holds, for a micro-batch of a given size.

    The layers run in the modes in which they are; in training, if all of them are in evaluation.
    They run under autocast if it is on.

    Args:
        layers: The backbone's, on any device; nothing is computed and no memory used.
        run_layer: Runs one of them.
        micro_batch: The input of the first layer, a pytree of tensors ``[n, …]``.
        optimizer_bytes: See :func:`held_tensors`.
        device: On which the layers will be, whose kernels save what they save; None: the host.

    Raises:
        UntraceableLayer: If a layer needs the values of its input.
    """
    place = Pretended(device or torch.device("cpu"))
    behind = place.for_backwards()
    trains = any(part.training for layer in layers for part in layer.modules())
    training = None if trains else True
    watch = _Watch(run_layer)
    facts, known = [], dict[Hashable, _Shown]()
    with state_kept_in_pass(layers), torch.enable_grad():
        value = _copied(micro_batch, place)
        for index, layer in enumerate(layers):
            given = Tree.of(value, "A layer's input")
            key = signature(layer, run_layer, index, given)
            shown = known.get(key)
            if shown is not None:
                value, found = shown.again(given, watch, place)
            else:
                own, versions = meta_tensors(layer, place), given.versions()
                again, own_again = given.value(), own
                if behind is not place:
                    again, own_again = _copied(again, behind), meta_tensors(layer, behind)
                watch.begin(own.values())
                value = run_layer_on_meta(
                    *(layer, watch.run_layer, index, value, own),
                    training=training,
                    place=place,
                )
                backward = in_backward(
                    *(layer, watch.run, index, again, own_again, training, behind)
                )
                found = watch.end(backward)
                output = Tree.of(value, "A layer's output")
                if key is not None and versions == given.versions():
                    shown = _Shown.of(given, output, found, watch)
                    known.update({key: shown} if shown is not None else {})
            after = Tree.of(value, "A layer's output").tensors()
            held, (saved, rest) = held_tensors(layer.modules(), optimizer_bytes), found
            kept = sum(t.nbytes for t in after if watch.known_number(t.untyped_storage()) in saved)
            boundaries = _boundary(given.tensors()), _boundary(after)
            facts.append(LayerMemory(held, *boundaries, kept, saved, *rest))
    return tuple(facts)


def _copied(sample: Any, place: Pretended) -> Any:
    """Tensors that pass for the given ones, as a stage gives them to its first layer."""
    leaves = Tree.of(sample, "The backbone's input").mapped(
        partial(graph_leaf_on_meta, place=place)
    )
    return leaves.mapped(Tensor.clone).value()  # none of the graph: layers may work in place


def _boundary(tensors: Iterable[Tensor]) -> Boundary:
    listed = list(tensors)
    return Boundary(sum(t.nbytes for t in listed), sum(t.nbytes for t in listed if t.requires_grad))


@dataclass(slots=True)
class _Watch:
    """Runs layers, and notes what autograd saves and what operations read and make.

    Args:
        run: Runs a layer.
    """

    run: RunLayer
    _numbers: dict[int, int] = field(default_factory=dict)
    _count: int = 0
    _operations: Operations = field(default_factory=lambda: Operations((), {}))
    _saved: dict[int, int] = field(default_factory=dict)

    def begin(self, own: Iterable[Tensor]) -> None:
        """Begin a layer, with its parameters and buffers."""
        self._saved = {}
        self._operations = Operations(own, self._saved)

    def run_layer(self, index: int, layer: Any, value: Any) -> Any:
        """Run it."""
        with self._operations, saved_tensors_hooks(self._save, _nothing):
            return self.run(index, layer, value)

    def end(self, in_backward: tuple[int, int] | None) -> _Found:
        """What it saved, and the rest of :class:`LayerMemory`.

        Args:
            in_backward: What lives in its backward, if that is known.
        """
        seen = self._operations
        most, own = in_backward or (seen.transient, seen.transient)
        behind = len(self._saved) - seen.saved_before
        return self._saved, (seen.forward, seen.first_half, seen.arriving, behind, most, own)

    def number(self, storage: torch.UntypedStorage) -> int:
        """The number of a piece of memory, a new one where it has none."""
        key = id(storage)
        if key not in self._numbers:
            self._numbers[key] = self.new_number()
            weakref.finalize(storage, self._numbers.pop, key)  # another one may get its id
        return self._numbers[key]

    def known_number(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a piece of memory that was saved; else None."""
        return self._numbers.get(id(storage))

    def new_number(self) -> int:
        """A number that no memory has."""
        self._count += 1
        return self._count - 1

    def is_own(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is the memory of the layer's parameters and buffers."""
        return id(storage) in self._operations.own

    def _save(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not self.is_own(storage):
            self._saved[self.number(storage)] = storage.nbytes()


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a layer has shown, for others that do the same.

    Args:
        returned: What it has returned.
        saved: What it saved: the place of an input, or of an output, or None, and bytes.
        rest: The rest of :class:`LayerMemory`.
    """

    returned: Returned
    saved: tuple[tuple[int | None, int | None, int], ...]
    rest: _Rest

    @classmethod
    def of(cls, given: Tree, output: Tree, found: _Found, watch: _Watch) -> _Shown | None:
        """What it has shown; None: an output shares memory with something else."""
        inputs: dict[int | None, int] = {}  # places by the numbers of memory, where it has one
        seen = set()
        for i, leaf in enumerate(given.leaves):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                seen.add(id(storage))
                inputs.setdefault(watch.known_number(storage), i)
        outputs: dict[int | None, int] = {}
        returned = Returned.of(given, output, _look)
        for i, (leaf, place) in enumerate(zip(output.leaves, returned.passed, strict=True)):
            if not isinstance(leaf, Tensor) or place is not None:
                continue
            storage = leaf.untyped_storage()
            fills = leaf.is_contiguous() and storage.nbytes() == leaf.nbytes
            if not fills or id(storage) in seen or watch.is_own(storage):
                return None
            seen.add(id(storage))
            outputs.setdefault(watch.known_number(storage), i)
        saved, rest = found
        places_of = tuple((inputs.get(n), outputs.get(n), nbytes) for n, nbytes in saved.items())
        return cls(returned, places_of, rest)

    def again(self, given: Tree, watch: _Watch, place: Pretended) -> tuple[Any, _Found]:
        """What another layer returns, and what is found of it.

        Args:
            given: Its input.
            watch: Numbers memory.
            place: For which device tensors pass.
        """
        with place.mode:  # copies, because layers may work in place, and not on leaves of the graph
            output = self.returned.again(given, Tensor.clone)
        saved = {}
        for source, target, nbytes in self.saved:
            if source is not None:
                number = watch.number(given.leaves[source].untyped_storage())
            elif target is not None:
                number = watch.number(output.leaves[target].untyped_storage())
            else:
                number = watch.new_number()
            saved[number] = nbytes
        return output.value(), (saved, self.rest)


def _look(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nothing(_: Any) -> Tensor:
    raise RuntimeError("A layer ran a backward in its forward.")
