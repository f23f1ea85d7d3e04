"""Notices layers that compute the samples of their input together.

Such as attention or a recurrent layer along dimension 0, a softmax over the batch, or experts that
take a part of it. Without a pipeline they see a mini-batch, here a micro-batch. So once in training
and once in evaluation a micro-batch goes through a stage twice more: as it is, and with others in
the place of the first half of its samples. What comes out for the second half must be the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.engine.randomness import LayerRandomness
from lightning_gpipe.engine.reproduced import rounding
from lightning_gpipe.model.layer_state import layer_state_kept
from lightning_gpipe.model.on_copies import on_copies
from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import Tree

_TEXT = (
    "Layer {index} ({layer}) of the backbone computes rows of its input together: what it gives for"
    " some depends on others. With micro-batches it sees {samples} at a time, so the weights come"
    " out other than without a pipeline. If dimension 0 is time, build the layer with"
    " batch_first=True. If rows are tokens, nodes or instances that belong together, give the"
    " backbone [batch, ...], padded. What is meant to compare samples belongs outside of the"
    " backbone, with step='mini-batch'. Or use chunks=1."
)
#: What a layer, by its index, makes of its input, the same each time.
_Run: TypeAlias = Callable[[int, Tree], Tree]


@dataclass(frozen=True, slots=True)
class _Samples:
    """How samples lie in a tensor: along one of its dimensions, which may have more rows than them.

    Args:
        count: The number of samples.
        dim: The dimension.
        shape: It alone, as two: samples and the rows of each, or the other way round.
        axis: Which of the two are the samples.
    """

    count: int
    dim: int
    shape: tuple[int, int]
    axis: int

    def first(self, tensor: Tensor) -> Tensor:
        """Those that are changed."""
        return self._part(tensor, 0, self.count // 2)

    def last(self, tensor: Tensor) -> Tensor:
        """As many from the end."""
        return self._part(tensor, self.count - self.count // 2, self.count // 2)

    def rest(self, tensor: Tensor) -> Tensor:
        """Those that stay."""
        return self._part(tensor, self.count // 2, self.count - self.count // 2)

    def _part(self, tensor: Tensor, start: int, length: int) -> Tensor:
        samples: Tensor = tensor.unflatten(self.dim, self.shape)
        return samples.narrow(self.dim + self.axis, start, length)


class Mixing:
    """Looks at the second micro-batch of the first call with gradients, and of the first without.

    Args:
        layers: Those of a stage, by their index in the backbone.
        device: Where they are.
        randomness: Seeds what they draw from.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, randomness: LayerRandomness
    ) -> None:
        self._layers, self._device, self._randomness = layers, device, randomness
        self._unseen = {True, False}
        self._single: Tree | None = None

    def kept(self, inputs: Tree, m: int, sizes: Sequence[int]) -> Tree | None:
        """A copy of a micro-batch's input, if a look is due; else None.

        Two of one sample each are put together.

        Args:
            inputs: Tensors ``[n, …]``, before the layers see them.
            m: The micro-batch.
            sizes: Samples in each.
        """
        if m > 1 or len(sizes) == 1 or (trains := torch.is_grad_enabled()) not in self._unseen:
            return None
        single, self._single = self._single, None
        if m == 0:
            self._single = inputs.mapped(_copied) if sizes[0] == sizes[1] == 1 else None
            return None
        self._unseen.discard(trains)
        if sizes[1] > 1:
            return inputs.mapped(_copied)
        return _together(single, inputs) if single is not None else None

    def look(
        self, inputs: Tree, m: int, sizes: Sequence[int], call: int, context: ForwardContext
    ) -> None:
        """Warn of the first layer that computes samples together.

        Args:
            inputs: What :meth:`kept` has returned.
            m: The micro-batch.
            sizes: Samples in each.
            call: The seed of the call.
            context: What surrounds the forward; must be in force.
        """
        base, mixer = self._randomness.begin_micro_batch(call, m, True), None

        def run(index: int, given: Tree) -> Tree:
            layer, value = self._layers[index], given.mapped(_copied).value()
            with layer_state_kept([layer]), on_copies(layer):
                self._randomness.seed(base, index, True)
                value = context.run_layer(index, layer, value)
            return Tree.of(value, "A layer's output").detached()

        with (
            suppress(Exception),  # a layer that can't run so isn't known
            preserved(self._device),
            torch.no_grad(),  # the first step holds no graph more than others
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the real calls warn
            along_rows = context.splits and 0 in self._layers
            mixer = self._mixer(inputs, max(sizes[m], 2), along_rows, run)
        if mixer is not None:
            self._unseen.clear()
            layer = type(self._layers[mixer]).__name__
            text = _TEXT.format(index=mixer, layer=layer, samples=sizes[m])
            warnings.warn(text, stacklevel=2)

    def _mixer(self, inputs: Tree, samples: int, along_rows: bool, run: _Run) -> int | None:
        """The first layer behind which samples aren't apart, in whichever way they may lie."""
        first = None
        for changed in _changed(inputs, samples, along_rows):
            found = self._mixer_of(inputs, changed, samples, run)
            if found is None:
                return None
            first = found if first is None else first
        return first

    def _mixer_of(self, inputs: Tree, changed: Tree, samples: int, run: _Run) -> int | None:
        """The same for one way.

        None: they are apart behind the last layer, or one gives something else each time.
        """
        found, one, other = None, inputs, changed
        for index in self._layers:
            given, one, other = one, run(index, one), run(index, other)
            if _are_apart(one, other, samples):
                found = None
            elif found is None:
                if not _are_apart(one, run(index, given), samples):
                    return None  # it gives something else each time
                found = index
        return found


def _copied(tensor: Tensor) -> Tensor:
    return strides.copy(tensor.detach())


def _together(one: Tree, other: Tree) -> Tree | None:
    """Two inputs of one sample each as one of two samples; None: they don't go together."""
    if one.spec != other.spec:
        return None
    leaves = []
    for t, u in zip(one.leaves, other.leaves, strict=True):
        is_single = isinstance(t, Tensor) and t.ndim and t.shape == u.shape and len(t) == 1
        leaves.append(torch.cat([t, u.detach()]) if is_single else u)
    return other.with_leaves(leaves)


def _changed(inputs: Tree, samples: int, along_rows: bool) -> Iterator[Tree]:
    """Inputs with the last samples in the place of the first, for each way in which they may lie.

    Only one tensor changes, the largest: another one may be no tensor of samples. Nor is one whose
    first dimension is 1, such as a weight that a loop uses between two blocks.
    """
    tensors = {i: t for i, t in enumerate(inputs.leaves) if isinstance(t, Tensor)}
    tensors = {i: t for i, t in tensors.items() if t.shape[:1] != (1,)}
    ways = {
        i: _one_by_one(t.shape[:1] if along_rows else t.shape, samples) for i, t in tensors.items()
    }
    if not along_rows and not any(ways.values()):
        ways = {i: _by_rows(t.shape[:1], samples) for i, t in tensors.items()}
    known = [i for i, found in ways.items() if found]
    if not known:
        return
    largest = max(known, key=lambda i: tensors[i].numel())
    for way in ways[largest]:
        leaves = list(inputs.leaves)
        leaves[largest] = changed = tensors[largest].clone()  # in whose memory nothing overlaps
        way.first(changed).copy_(way.last(tensors[largest]))
        yield inputs.with_leaves(leaves)


def _are_apart(one: Tree, other: Tree, samples: int) -> bool:
    """Whether the rest of the samples is the same in two outputs, as far as it's known where."""
    pairs = zip(one.leaves, other.leaves, strict=True)
    return all(
        _is_same(t, u, _one_by_one(t.shape, samples) + _by_rows(t.shape, samples))
        for t, u in pairs
        if isinstance(t, Tensor) and t.is_floating_point()
    )


def _is_same(one: Tensor, other: Tensor, ways: Sequence[_Samples]) -> bool:
    if one.shape != other.shape:
        return False
    return not ways or any(_are_close(way.rest(one), way.rest(other)) for way in ways)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.numel():
        return True
    allowed = rounding(one.dtype) * one.abs().max()
    return bool(((one - other).abs().max() <= allowed) | ~torch.isfinite(allowed))


def _one_by_one(shape: Sequence[int], samples: int) -> list[_Samples]:
    """How samples may lie in a tensor that has one row for each."""
    dims = [d for d, size in enumerate(shape) if size == samples]
    return [_Samples(samples, d, (samples, 1), 0) for d in dims]


def _by_rows(shape: Sequence[int], samples: int) -> list[_Samples]:
    """How they may lie in one that has several."""
    dims = [d for d, size in enumerate(shape) if size > samples and size % samples == 0]
    rows = [(d, shape[d] // samples) for d in dims]
    return [
        *(_Samples(samples, d, (samples, each), 0) for d, each in rows),
        *(_Samples(samples, d, (each, samples), 1) for d, each in rows),
    ]
