"""How many micro-batches: M, chosen with the batch in sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.tensors.microbatch import Split, batch_leaf
from lightning_gpipe.tensors.tree import Tree

#: Samples of a micro-batch below which the statistics of batch norm are mostly noise.
FEW_SAMPLES = 4


def decide_chunks(
    chunks: int, settings: Settings, body: nn.Module, sample: Any, warn: Callable[[str], object]
) -> int:
    """Choose M for the batch that the backbone is called with first.

    Args:
        chunks: M as the user chose it, or 4 x stages.
        settings: What the user chose.
        body: The backbone.
        sample: Its input; None if it isn't known yet.
        warn: Called with a text where batch norm sees few samples.

    Returns:
        What the user chose. Where that is ``"auto"`` at most as many as there are samples, and
        such that batch norm sees at least :data:`FEW_SAMPLES` at once, if there are as many.
    """
    found = _samples_of(sample)
    if found is None:
        return chunks
    samples = max(1, found)
    norms = [m for m in body.modules() if isinstance(m, _BatchNorm)]
    if settings.chunks == "auto":
        chunks = min(chunks, _most(samples, body))
    in_each = samples // min(chunks, samples)
    if any(m.training for m in norms) and in_each < min(FEW_SAMPLES, samples):
        warn(
            f"A batch of {samples} samples in {min(chunks, samples)} micro-batches leaves batch"
            f" norm {in_each} at once, and it normalises by these: choose"
            f" chunks={max(1, samples // FEW_SAMPLES)} or a larger batch, or chunks='auto'."
        )
    return chunks


def more_chunks(chunks: int, body: nn.Module, sample: Any) -> list[int]:
    """Which M there are from a given one on, each twice the one before, for smaller micro-batches.

    Args:
        chunks: The smallest.
        body: The backbone.
        sample: Its input.

    Returns:
        No more than ``"auto"`` may choose; see :func:`decide_chunks`.
    """
    samples = _samples_of(sample)
    found, most = [chunks], 0 if samples is None else _most(samples, body)
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


def _most(samples: int, body: nn.Module) -> int:
    """The largest M that leaves batch norm enough samples, in evaluation, too."""
    has_norms = any(isinstance(module, _BatchNorm) for module in body.modules())
    return max(1, samples // FEW_SAMPLES if has_norms else samples)


def micro_batches(chunks: int, sample: Any) -> int:
    """How many micro-batches there are of an input: no more than it has samples."""
    samples = _samples_of(sample)
    return chunks if samples is None else max(1, min(chunks, samples))


def largest_micro_batch(chunks: int, sample: Any) -> int | None:
    """How many samples the largest micro-batch of an input has; None: not known."""
    samples = _samples_of(sample)
    return None if samples is None else -(-samples // micro_batches(chunks, sample))


def micro_batch_of(
    batch: Tree, chunks: int, layers: Sequence[nn.Module], run_layer: RunLayer
) -> Tree:
    """The first micro-batch of a backbone's input, the largest, cut as the pipeline cuts it.

    Args:
        batch: The input.
        chunks: M.
        layers: The backbone's.
        run_layer: Runs one of them.

    Returns:
        Views of it.

    Raises:
        ValueError: If it can't be split, or it can't be told which tensors are for all samples.
    """
    whole = frozenset[int]()
    if chunks > 1:
        whole = PerSample(layers, chunks, nullcontext).whole(batch, run_layer)
    return Split.plan(batch, chunks, whole).scatter(batch)[0]


def _samples_of(sample: Any) -> int | None:
    """How many samples an input has; None: it has no batch."""
    tree = Tree.of(sample, "The backbone's input")
    first = batch_leaf(tree)
    return None if first is None else int(tree.leaves[first].shape[0])
