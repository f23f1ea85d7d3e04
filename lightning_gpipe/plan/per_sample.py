"""Tells which tensors beside the batch have an entry for each sample, and which are for all.

A mask ``[T, T]`` or a table of positions ``[T, d]`` looks like a batch of T samples where the batch
has T samples. The layers tell: run on the meta device with another number of samples, they take a
tensor of that many entries or the one of T, not both. Where they take both, nobody can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_gpipe.model.alike import Returned, signature
from lightning_gpipe.model.layer_state import state_kept_in_pass
from lightning_gpipe.model.on_meta import UntraceableLayer, run_layer_on_meta, to_meta_leaf
from lightning_gpipe.model.program import kind_of, unskipped
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.origins import Origins
from lightning_gpipe.tensors.microbatch import Outline, Split, batch_leaf
from lightning_gpipe.tensors.random_state import preserved
from lightning_gpipe.tensors.tree import Tree, tree_tensors

#: Inputs that are remembered: models whose inputs differ in every step have no use for more.
_REMEMBERED = 64
#: Trials of one input; enough for five tensors in doubt.
_TRIALS = 32

Leaves: TypeAlias = frozenset[int]


class PerSample:
    """Remembers of the backbone's inputs which tensors are the same for all samples.

    Args:
        layers: The backbone's.
        chunks: M.
        as_written: Makes all of them callable as without a pipeline.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        chunks: int,
        as_written: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._layers = layers
        self._chunks = chunks
        self._as_written = as_written
        self._known: dict[Any, dict[int, bool]] = {}
        self._outlines: dict[str, Outline | None] = {}

    def whole(self, batch: Tree, run_layer: RunLayer) -> Leaves:
        """The leaves that are for all samples, though as long as the batch. Local.

        It depends on shapes and types alone, so it is the same on every stage.

        Args:
            batch: The backbone's input.
            run_layer: Runs one of its layers.

        Raises:
            ValueError: If it can't be told, or if dimension 0 isn't the batch.
        """
        first = batch_leaf(batch)
        if first is None or batch.leaves[first].shape[0] < 2:
            return frozenset()
        run_layer, samples = unskipped(run_layer), batch.leaves[first].shape[0]
        roles = self._roles_of(batch, run_layer)
        is_new = not roles
        roles[first] = True
        for i in _beside(batch, first):
            if batch.leaves[i].shape[0] not in (1, samples):
                roles[i] = False  # it isn't a batch's length now, so it never means samples
        same = [i for i in _beside(batch, first) if batch.leaves[i].shape[0] == samples]
        doubtful = [i for i in same if i not in roles]
        if doubtful:
            known = frozenset(i for i in same if not roles.get(i, True))
            with self._as_written(), torch.inference_mode(False):
                trials = _Trials(self._layers, run_layer, batch, first, known)
                found = trials.told(doubtful)
            roles.update((i, i not in found) for i in doubtful)
        whole = frozenset(i for i in same if not roles[i])
        if is_new:
            with self._as_written(), torch.inference_mode(False):
                trials = _Trials(self._layers, run_layer, batch, first, whole)
                trials.check_cut(max(1, samples // self._chunks))
        return whole

    def outline(self, batch: Tree, run_layer: RunLayer, split: Split) -> Outline | None:
        """What the layers return for two other sizes of a micro-batch. Local.

        Args:
            batch: The backbone's input.
            run_layer: Runs one of its layers.
            split: How it is split.

        Returns:
            None if a layer needs values.
        """
        run_layer = unskipped(run_layer)
        kind = partial(kind_of, run_layer)
        kinds = [(t.ndim, t.dtype) if isinstance(t, Tensor) else kind(t) for t in batch.leaves]
        key = repr((batch.spec, kinds, split.split_leaves))
        if key not in self._outlines:
            if len(self._outlines) >= _REMEMBERED:
                self._outlines.clear()
            device = torch.device("cpu")
            with self._as_written(), torch.inference_mode(False), preserved(device):
                self._outlines[key] = self._traced(batch, run_layer, split)
        return self._outlines[key]

    def _traced(self, batch: Tree, run_layer: RunLayer, split: Split) -> Outline | None:
        fewer, more = _other_numbers(batch, split.sizes[0])
        try:
            first, second = (
                self._trace(batch, run_layer, split, samples) for samples in (fewer, more)
            )
        except UntraceableLayer:
            return None
        if first[0].spec != second[0].spec:
            return None
        recipes = zip(first[1], second[1], strict=True)
        alike = tuple(recipe is not None and recipe == other for recipe, other in recipes)
        return Outline((fewer, more), (first[0], second[0]), alike)

    def _trace(
        self, batch: Tree, run_layer: RunLayer, split: Split, samples: int
    ) -> tuple[Tree, list[int | None]]:
        """What comes out, and how each tensor is made; None: of values of the batch."""
        leaves = [
            torch.empty(samples, *leaf.shape[1:], dtype=leaf.dtype, device="meta")
            if is_split
            else to_meta_leaf(leaf)
            for leaf, is_split in zip(batch.leaves, split.split_leaves, strict=True)
        ]
        value = batch.with_leaves(leaves).value()
        origins = Origins(itertools.compress(leaves, split.split_leaves))
        known = dict[Hashable, Returned]()
        with state_kept_in_pass(self._layers), origins:
            for index, layer in enumerate(self._layers):
                given = _tree_of(value)
                look = None if given is None else signature(layer, run_layer, index, given)
                if given is None or look is None:
                    value = run_layer_on_meta(layer, run_layer, index, value)
                    continue
                key = look, tuple(origins.is_of_batch(leaf) for leaf in given.leaves)
                if key in known:
                    value = known[key].again(given, origins.another_of_batch).value()
                    continue
                value = run_layer_on_meta(layer, run_layer, index, value)
                output = _tree_of(value)
                if output is not None and _is_of_batch_or_given(output, given, origins):
                    known[key] = Returned.of(given, output, to_meta_leaf)
        made = Tree.of(value, "The backbone's output")
        tensors = (leaf if isinstance(leaf, Tensor) else None for leaf in made.leaves)
        return made.detached(), [
            None if leaf is None or origins.is_of_batch(leaf) else origins.recipe(leaf)
            for leaf in tensors
        ]

    def _roles_of(self, batch: Tree, run_layer: RunLayer) -> dict[int, bool]:
        """For leaves of inputs like this one, as far as it is known: whether one a sample."""
        texts = tuple(kind_of(run_layer, t) for t in batch.leaves if isinstance(t, str))
        key = repr(batch.spec), texts
        if key not in self._known and len(self._known) >= _REMEMBERED:
            self._known.clear()
        return self._known.setdefault(key, {})


class _Trials:
    """Runs of the layers with another number of samples.

    Args:
        layers: All of them.
        run_layer: Runs one of them.
        batch: The input.
        first: Its leaf that is the batch.
        known: Leaves that are for all samples.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        run_layer: RunLayer,
        batch: Tree,
        first: int,
        known: Leaves,
    ) -> None:
        self._layers = layers
        self._run_layer = run_layer
        self._batch = batch
        self._first = first
        self._known = known
        self._samples = batch.leaves[first].shape[0]
        self._others = list(_other_numbers(batch, self._samples))
        self._failed: UntraceableLayer | None = None

    def told(self, doubtful: Sequence[int]) -> Leaves:
        """Which of the leaves in doubt are for all samples.

        Raises:
            ValueError: If it can't be told.
        """
        subsets = list(itertools.islice(_subsets(doubtful), _TRIALS))
        possible = [whole for whole in subsets if self._runs(whole)]
        if not possible:  # a layer needs values, or the number of samples that it was built for
            dimensions = {*self._batch.leaves[self._first].shape[1:]}
            for i in doubtful:
                if self._samples in {*dimensions, *self._batch.leaves[i].shape[1:]}:
                    raise self._cannot_tell(i)
            return frozenset()
        least = possible[0]
        for other in possible[1:]:
            unclear = other ^ least
            if self._meets_batch(least, unclear):
                raise self._cannot_tell(min(unclear))
        return least

    def check_cut(self, samples: int) -> None:
        """Check that dimension 0 of the input may be cut.

        Args:
            samples: Of a micro-batch.

        Raises:
            ValueError: If the layers take the mini-batch, but no micro-batch.
        """
        try:
            self._run(self._input(frozenset(), samples))
        except UntraceableLayer as error:
            try:
                self._run(self._input(frozenset(), self._samples))
            except UntraceableLayer:
                return  # it can't be known
            raise ValueError(
                f"The backbone's layers take an input of {self._samples} along dimension 0, but"
                f" none of {samples}. Dimension 0 is the batch and is cut into micro-batches: give"
                " the backbone [batch, …], with x.unsqueeze(0) for a single sample, and layers that"
                f" work with any number of samples. ({error})"
            ) from error

    def _runs(self, whole: Leaves) -> bool:
        """Whether the layers take these leaves as they are, with other numbers of samples.

        The samples' number may show in the first dimension of what a layer returns, not in others.
        """
        try:
            shapes = [self._run(self._input(whole, samples)) for samples in self._others]
        except UntraceableLayer as error:
            self._failed = error
            return False
        return all(found == shapes[0] for found in shapes)

    def _meets_batch(self, whole: Leaves, leaves: Leaves) -> bool:
        """Whether a layer computes something from the batch and one of these leaves."""
        given = self._input(whole, self._others[0])
        origins = Origins([given.leaves[self._first]], [given.leaves[i] for i in leaves])
        with origins:
            self._run(given, is_followed=True)
        return origins.met

    def _input(self, whole: Leaves, samples: int) -> Tree:
        """The input with another number of samples, on the meta device."""
        beside = _beside(self._batch, self._first)
        leaves = []
        for i, leaf in enumerate(self._batch.leaves):
            changes = i == self._first or (
                i in beside and leaf.shape[0] == self._samples and i not in whole | self._known
            )
            leaves.append(
                torch.empty(samples, *leaf.shape[1:], dtype=leaf.dtype, device="meta")
                if changes
                else to_meta_leaf(leaf)
            )
        return self._batch.with_leaves(leaves)

    def _run(self, given: Tree, is_followed: bool = False) -> list[torch.Size]:
        """Run the layers, of those that do the same one, unless their operations are followed.

        Returns:
            The shapes of all that they return, but for their first dimensions.
        """
        value, shapes, known = given.value(), [], dict[Hashable, Tree]()
        with state_kept_in_pass(self._layers), torch.no_grad():
            for index, layer in enumerate(self._layers):
                tree = None if is_followed else _tree_of(value)
                look = None if tree is None else signature(layer, self._run_layer, index, tree)
                if look is not None and look in known:
                    value = known[look].mapped(to_meta_leaf).value()
                else:
                    value = self._made(index, layer, value)
                    output = _tree_of(value)
                    if look is not None and output is not None:
                        known[look] = output.mapped(to_meta_leaf)
                shapes += [t.shape[1:] for t in tree_tensors(value)]
        return shapes

    def _made(self, index: int, layer: nn.Module, value: Any) -> Any:
        """What a layer returns, unless it takes dimension 0 of its input for time."""
        if not isinstance(layer, _SEQUENCE_LAYERS):
            return run_layer_on_meta(layer, self._run_layer, index, value)

        def run(_: int, layer: Any, value: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                _refuse_time_first(index, layer, (args, kwargs))
                return layer(*args, **kwargs)

            return self._run_layer(index, call, value)

        try:
            return run_layer_on_meta(layer, run, index, value)
        except UntraceableLayer as error:
            if isinstance(error.__cause__, TimeFirst):
                raise error.__cause__ from None
            raise

    def _cannot_tell(self, i: int) -> ValueError:
        shape, n = list(self._batch.leaves[i].shape), self._samples
        why = "" if self._failed is None else f" (They were run without data: {self._failed}.)"
        return ValueError(
            f"Tensor {i} of the backbone's input, of shape {shape}, is as long as the batch of {n}"
            " samples, and the layers don't tell whether it has an entry for each sample, and is"
            " split into micro-batches with the batch, or is the same for all samples. If it is the"
            f" same for all, give it a first dimension of 1: {[1, *shape]}. If it has an entry for"
            f" each sample, choose a batch size that is no other dimension's ({n} here), and"
            f" compute outside the backbone what mixes samples with each other.{why}"
        )


class TimeFirst(ValueError):
    """A layer takes dimension 0 of its input for time."""


def _tree_of(value: Any) -> Tree | None:
    """What a layer hands on; None: the next one of its stage may take it, but none of another."""
    try:
        return Tree.of(value, "A layer's output")
    except TypeError:
        return None


def _is_of_batch_or_given(output: Tree, given: Tree, origins: Origins) -> bool:
    """Whether all that a layer returned is computed from the batch, or was handed through."""
    known = {id(tensor) for tensor in given.tensors()}
    return all(id(t) in known or origins.is_of_batch(t) for t in output.tensors())


def _refuse_time_first(index: int, layer: nn.Module, value: Any) -> None:
    """Refuse a layer that takes dimension 0 of its input for time.

    Args:
        index: Its place.
        layer: The layer.
        value: What it is called with.
    """
    hidden = next(iter(tree_tensors(value)), None)
    if hidden is None or not isinstance(layer, _SEQUENCE_LAYERS) or hidden.ndim not in (2, 3):
        return
    attention = getattr(layer, "self_attn", layer)
    if hidden.ndim == 3 and getattr(attention, "batch_first", False):
        return
    raise TimeFirst(
        f"Layer {index} ({type(layer).__name__}) of the backbone takes dimension 0 of its input"
        f" {list(hidden.shape)} for time, but dimension 0 is the batch and is cut into"
        " micro-batches: build the layer with batch_first=True, and give it [batch, time, width]."
    )


#: Layers whose input is [time, batch, width] unless they are built otherwise, or [time, width].
_SEQUENCE_LAYERS = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _beside(batch: Tree, first: int) -> list[int]:
    """The tensors beside the batch that might be split."""
    tensors = ((i, leaf) for i, leaf in enumerate(batch.leaves) if isinstance(leaf, Tensor))
    found = [(i, t) for i, t in tensors if i != first and not isinstance(t, nn.Parameter)]
    return [i for i, tensor in found if tensor.ndim > 0]


def _other_numbers(batch: Tree, samples: int) -> Iterator[int]:
    """Two numbers of samples for trials: no dimension of the input, one smaller if there is one."""
    taken = {size for t in batch.tensors() for size in t.shape}
    smaller = (n for n in range(samples - 1, 1, -1) if n not in taken)
    larger = (n for n in itertools.count(samples + 1) if n not in taken)
    return itertools.islice(itertools.chain(itertools.islice(smaller, 1), larger), 2)


def _subsets(items: Sequence[int]) -> Iterator[Leaves]:
    """All subsets, small ones first."""
    for size in range(len(items) + 1):
        yield from map(frozenset, itertools.combinations(items, size))
