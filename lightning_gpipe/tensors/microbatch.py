"""Splits a mini-batch into micro-batches, and merges what comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_gpipe.tensors.tree import Leaf, Tree


def batch_leaf(batch: Tree) -> int | None:
    """The leaf that tells the number of samples: the first tensor that has a dimension.

    A parameter is the batch only where there is no other tensor, as an image that is optimized.
    """
    tensors = [i for i, t in enumerate(batch.leaves) if isinstance(t, Tensor) and t.ndim]
    others = [i for i in tensors if not isinstance(batch.leaves[i], torch.nn.Parameter)]
    return next(iter(others or tensors), None)


@dataclass(frozen=True, slots=True)
class Split:
    """How a mini-batch is split.

    Args:
        sizes: Samples in each micro-batch; they differ by one at most, and none is empty.
        split_leaves: For each leaf whether it is split; the others go to every micro-batch as they
            are.
    """

    sizes: tuple[int, ...]
    split_leaves: tuple[bool, ...]

    @classmethod
    def plan(cls, batch: Tree, chunks: int, whole: Collection[int] = ()) -> Split:
        """Plan the split of a mini-batch along dimension 0.

        The first tensor that has a dimension tells the number of samples N; see
        :func:`batch_leaf`. Tensors whose first dimension is not N are passed whole, and so is an
        ``nn.Parameter`` beside it. N need not be a multiple
        of ``chunks``: the sizes are those of ``torch.tensor_split``, and with fewer samples than
        chunks there are N micro-batches.

        Args:
            batch: The input of the backbone, tensors ``[N, …]``.
            chunks: M, the number of micro-batches wanted.
            whole: Leaves that are passed whole, however long they are.

        Raises:
            ValueError: If the batch has no tensor with a dimension, or no samples.
        """
        first = batch_leaf(batch)
        if first is None:
            raise ValueError(
                "The backbone's input has no tensor with a batch dimension, so it can't be split"
                " into micro-batches. Give the backbone at least one tensor of shape [batch, ...]."
            )
        samples = batch.leaves[first].shape[0]
        if samples == 0:
            raise ValueError(
                "The backbone's input has 0 samples (its first dimension is 0): nothing to split."
                " Let the data loader's sampler or collate_fn leave out empty batches."
            )
        count = min(chunks, samples)
        sizes = tuple(samples // count + (m < samples % count) for m in range(count))
        split_leaves = tuple(
            i == first
            or (
                i not in whole
                and isinstance(t, Tensor)
                and not isinstance(t, torch.nn.Parameter)
                and t.ndim > 0
                and t.shape[0] == samples
            )
            for i, t in enumerate(batch.leaves)
        )
        return cls(sizes, split_leaves)

    def scatter(self, batch: Tree) -> list[Tree]:
        """The micro-batches of a mini-batch, as views of it."""
        if len(self.sizes) == 1:
            return [batch]
        columns = [
            leaf.split(self.sizes) if split else (leaf,) * len(self.sizes)
            for leaf, split in zip(batch.leaves, self.split_leaves, strict=True)
        ]
        return [
            batch.with_leaves([column[m] for column in columns]) for m in range(len(self.sizes))
        ]

    def gather_gradients(
        self,
        like: Sequence[Tensor],
        is_split: Sequence[bool],
        gradients: Sequence[Sequence[Tensor | None]],
    ) -> list[Tensor | None]:
        """The gradient of the mini-batch's tensors from those of the micro-batches.

        Args:
            like: The mini-batch's tensors that want a gradient.
            is_split: For each of them whether it was split.
            gradients: For each micro-batch, in order, the gradient of each of these tensors; None
                counts as zeros.

        Returns:
            For each tensor its gradient, or None if no micro-batch has one. Tensors passed whole
            get the sum.
        """
        merged: list[Tensor | None] = []
        for i, tensor in enumerate(like):
            column = [row[i] for row in gradients]
            present = [g for g in column if g is not None]
            if not present:
                merged.append(None)
            elif not is_split[i]:
                merged.append(torch.stack(present).sum(0) if len(present) > 1 else present[0])
            elif len(column) == 1:
                merged.append(present[0])
            else:
                parts = tensor.detach().split(self.sizes)
                merged.append(
                    torch.cat(
                        [
                            torch.zeros_like(p) if g is None else g
                            for p, g in zip(parts, column, strict=True)
                        ]
                    )
                )
        return merged


@dataclass(frozen=True, slots=True)
class Outline:
    """What comes out for two sizes of a micro-batch: shapes and numbers, no values of tensors.

    Where all micro-batches have the same size, it alone tells a constant from what is per sample.

    Args:
        sizes: The two numbers of samples.
        outputs: The output for each.
        alike: For each leaf whether it is a tensor that is computed alike for both, and not of the
            batch's values.
    """

    sizes: tuple[int, int]
    outputs: tuple[Tree, Tree]
    alike: tuple[bool, ...]

    def is_constant(self, i: int) -> bool:
        """Whether a leaf is the same for every size.

        Raises:
            ValueError: If it depends on the size in another way than by rows per sample.
        """
        first, second = (tree.leaves[i] for tree in self.outputs)
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            if first == second:
                return True
            raise ValueError(
                f"Leaf {i} of the backbone's output is a number that depends on the size of the"
                f" micro-batch: {first} for {self.sizes[0]} samples, {second} for"
                f" {self.sizes[1]}. Compute it in the step, from the whole batch."
            )
        if first.ndim == 0 and not self.alike[i]:
            raise ValueError(
                f"Leaf {i} of the backbone's output is a tensor without dimensions that is computed"
                " of a micro-batch, or of its size, so it would not be the whole batch's. Return"
                " values per sample, shape [batch, ...], and reduce them in the step."
            )
        if first.shape == second.shape:
            return True
        if _lengths([first, second], self.sizes) is None or first.shape[1:] != second.shape[1:]:
            raise ValueError(
                f"Leaf {i} of the backbone's output has shape {tuple(first.shape)} for"
                f" {self.sizes[0]} samples and {tuple(second.shape)} for {self.sizes[1]}, so it"
                " can't be merged along dimension 0. Return values per sample, shape [batch, ...]."
            )
        return False


GetOutline: TypeAlias = Callable[[], Outline | None]


def unknown() -> Outline | None:
    """Nothing is known but what the micro-batches tell."""
    return None


@dataclass(frozen=True, slots=True)
class Merge:
    """How the outputs of micro-batches became the output of the mini-batch.

    Args:
        lengths: For each leaf the length of every micro-batch's part along dimension 0, or None for
            a leaf that is the same for all.
    """

    lengths: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def merge(
        cls,
        outputs: Sequence[Tree],
        split: Split,
        batch: Tree,
        outline: GetOutline = unknown,
    ) -> tuple[Tree, Merge]:
        """Concatenate the outputs of all micro-batches along dimension 0.

        Args:
            outputs: One tree a micro-batch, without gradients.
            split: How the input was split.
            batch: The input: a tensor that was passed whole may come out whole.
            outline: Tells what comes out for other sizes, if it can be known; asked only where the
                micro-batches alone don't tell.

        Returns:
            The mini-batch's output, and how to split its gradient.

        Raises:
            ValueError: If the micro-batches' outputs differ in structure, or a leaf has neither the
                batch as its first dimension nor the same value for every micro-batch.
        """
        first, sizes = outputs[0], split.sizes
        if len(outputs) == 1:
            return first, cls((None,) * len(first.leaves))
        whole = [
            leaf
            for leaf, is_split in zip(batch.leaves, split.split_leaves, strict=True)
            if isinstance(leaf, Tensor) and not is_split
        ]
        if any(tree.spec != first.spec for tree in outputs):
            raise ValueError(
                "The backbone returned different structures for different micro-batches:"
                f" {sorted({str(tree.spec) for tree in outputs})}. They must be alike to be merged."
            )
        leaves: list[Leaf] = []
        lengths: list[tuple[int, ...] | None] = []
        for i in range(len(first.leaves)):
            column = [tree.leaves[i] for tree in outputs]
            length = _lengths(column, sizes)
            if length and any(_all_equal([tensor, *column]) for tensor in whole):
                length = None
            if _is_ambiguous(column, split, whole, batch, length):
                known = outline()
                if known is not None and known.outputs[0].spec == first.spec:
                    length = None if known.is_constant(i) else length
                elif length != sizes and _all_equal(column):
                    raise _cannot_tell(i, column[0], sizes[0])
            if length:
                _check_alike(i, column)
                leaves.append(torch.cat(column))
            elif _all_equal(column):
                leaves.append(column[0])
            else:
                shape = tuple(column[0].shape) if isinstance(column[0], Tensor) else column[0]
                raise ValueError(
                    f"Leaf {i} of the backbone's output ({shape} for the first micro-batch of"
                    f" {sizes[0]} samples) has no batch dimension and differs between"
                    " micro-batches, so it can't be merged. Return values per sample, shape [batch,"
                    " ...], and reduce them in the step; or use chunks=1."
                )
            lengths.append(length)
        return first.with_leaves(leaves), cls(tuple(lengths))

    def scatter_gradients(
        self, gradients: Sequence[Tensor | None], micro_batches: int
    ) -> list[list[Tensor | None]]:
        """The gradients of every micro-batch's output from those of the merged one, as views."""
        rows: list[list[Tensor | None]] = [[None] * len(gradients) for _ in range(micro_batches)]
        for i, (gradient, lengths) in enumerate(zip(gradients, self.lengths, strict=True)):
            if gradient is None:
                continue
            if micro_batches == 1 or lengths is None:
                rows[0][i] = gradient
            else:
                for m, part in enumerate(gradient.split(lengths)):
                    rows[m][i] = part
        return rows


def _is_ambiguous(
    column: Sequence[Leaf],
    split: Split,
    whole: Sequence[Tensor],
    batch: Tree,
    length: tuple[int, ...] | None,
) -> bool:
    """Whether a leaf may be a constant, or a number that counts the micro-batch, and look alike."""
    if len(set(split.sizes)) > 1:
        return False  # of different sizes the lengths and the numbers tell
    first = column[0]
    if isinstance(first, Tensor):
        return length is not None or (
            first.ndim == 0 and not any(_all_equal([tensor, *column]) for tensor in whole)
        )
    is_number = isinstance(first, (int, float)) and not isinstance(first, bool)
    return is_number and not any(
        type(leaf) is type(first) and leaf == first for leaf in batch.leaves
    )


def _cannot_tell(i: int, leaf: Leaf, size: int) -> ValueError:
    what = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
    return ValueError(
        f"Leaf {i} of the backbone's output, {what}, is the same for all micro-batches of {size}"
        " samples, and since the layers can't run without data it isn't known whether it would be"
        " the same for the whole batch. Return values per sample, shape [batch, ...], and compute"
        " the rest in the step; or use chunks=1."
    )


def _check_alike(i: int, column: Sequence[Tensor]) -> None:
    """Check that the micro-batches' parts of a leaf fit together."""
    kinds = {(tuple(part.shape[1:]), part.dtype) for part in column}
    if len(kinds) > 1:
        shapes = [tuple(part.shape) for part in column]
        raise ValueError(
            f"Leaf {i} of the backbone's output differs between micro-batches in more than the"
            f" number of samples: shapes {shapes}, types {sorted({str(t.dtype) for t in column})}."
            " Pad to one length before the backbone, not to what a micro-batch needs; or use"
            " chunks=1."
        )


def _lengths(column: Sequence[Leaf], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Length of each part along dimension 0, if it is a fixed number of rows per sample."""
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in column):
        return None
    lengths = tuple(leaf.shape[0] for leaf in column)
    rows_per_sample, rest = divmod(lengths[0], sizes[0])
    if rest:
        return None
    if any(length != size * rows_per_sample for length, size in zip(lengths, sizes, strict=True)):
        return None
    return lengths


def _all_equal(column: Sequence[Leaf]) -> bool:
    first = column[0]
    if isinstance(first, Tensor):
        return all(
            leaf is first or (isinstance(leaf, Tensor) and _are_equal(leaf, first))
            for leaf in column[1:]
        )
    return all(not isinstance(leaf, Tensor) and leaf == first for leaf in column[1:])


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether type, device, shape and values are the same; NaN is equal to NaN."""
    if a.dtype != b.dtype or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
