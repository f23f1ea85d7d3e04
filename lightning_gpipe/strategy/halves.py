"""What comes of samples when they are exchanged tells whether they are computed together.

Samples are put into two halves, A and B, and a step runs four times: as it did, with the halves
exchanged, with A in the place of B, too, and with B in the place of A. What is a sum, or a mean, of
something of each sample is *separable*: f(A, B) + f(B, A) = f(A, A) + f(B, B), and the derivative
in a sample depends on its own half alone, whatever functions it is made of. What is one of all
samples is the same when they change places: f(A, B) = f(B, A).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: The four runs, by what is in the places of A and B.
AB, BA, AA, BB = range(4)
#: To which half a sample, or a row, belongs.
A, B, NEITHER = range(3)


def halves_of(samples: int, seed: int) -> list[Tensor]:
    """Ways to put samples into halves: of four, any two are in the same half in one of them.

    What a half has more than the other one has no counterpart, and is in neither.

    Args:
        samples: How many there are.
        seed: Of their order.
    """
    places = torch.randperm(
        samples, device="cpu", generator=torch.Generator("cpu").manual_seed(seed)
    )
    ways = places & 1, places >> 1 & 1, (places ^ places >> 1) & 1
    return [_in_pairs(way) for way in ways if way.any()][: max(samples - 1, 0)]


def _in_pairs(halves: Tensor) -> Tensor:
    a, b = (halves == A).nonzero()[:, 0], (halves == B).nonzero()[:, 0]
    for more, fewer in (a, b), (b, a):
        halves[more[len(fewer) :]] = NEITHER
    return halves


def of_rows(halves: Tensor, rows: int) -> Tensor | None:
    """To which half each row belongs, where samples have their rows one after another.

    Args:
        halves: To which half each sample belongs.
        rows: How many rows there are.
    """
    if not rows or rows % len(halves):
        return None
    return halves.repeat_interleave(rows // len(halves))


def of_given(four: Sequence[Tensor], halves: Tensor, share: float) -> Tensor | None:
    """To which half each row belongs of something that is computed of samples one by one.

    Args:
        four: What it is in the four runs.
        halves: To which half each row belongs if they are in the order of samples.
        share: What may be due to rounding.

    Returns:
        None if it isn't known, as where samples are the same.
    """
    on_a, on_b = depends(four, share)
    are_known = on_a | on_b
    found = torch.where(on_a, A, torch.where(on_b, B, NEITHER))
    if torch.equal(found[are_known], halves[are_known]):
        return halves
    return found if int(are_known.sum()) == int((halves != NEITHER).sum()) else None


def are_reordered(four: Sequence[Tensor]) -> bool:
    """Whether rows are those of samples one by one, in an order that depends on all of them.

    Args:
        four: What they are in the four runs.
    """
    rows = [t.to(torch.float64).reshape(len(t), -1) for t in four]
    directions = torch.arange(8 * rows[0].shape[1], dtype=torch.float64, device=four[0].device)
    features = [(row @ directions.sin().view(-1, 8)).cos().sum(0) for row in rows]
    return all(is_separable(column, 1e-6) for column in torch.stack(features, 1).tolist())


def exchanged(tensor: Tensor, halves: Tensor) -> list[Tensor]:
    """A tensor in the four runs.

    Args:
        tensor: The tensor.
        halves: To which half each of its rows belongs.
    """
    a, b, found = (halves == A).nonzero()[:, 0], (halves == B).nonzero()[:, 0], []
    for in_a, in_b in (a, b), (b, a), (a, a), (b, b):
        index = torch.arange(len(halves), device="cpu")
        index[a], index[b] = in_a, in_b
        found.append(tensor.detach().index_select(0, index.to(tensor.device)))
    return found


def depends(four: Sequence[Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Which rows depend on what is in the place of A, and of B.

    Args:
        four: What they are in the four runs.
        share: What may be due to rounding, of the largest one that differs.
    """

    def differ(left: Tensor, right: Tensor) -> Tensor:
        changed = left != right
        if share and left.numel():
            size = torch.where(changed, left.abs().maximum(right.abs()), 0).max()
            changed &= (left - right).abs() > share * size
        return changed.reshape(len(left), -1).any(1).cpu()

    on_a = differ(four[AB], four[BB]) | differ(four[AA], four[BA])
    on_b = differ(four[AB], four[AA]) | differ(four[BB], four[BA])
    return on_a, on_b


def mixes(four: Sequence[Tensor], samples: int, share: float) -> bool:
    """Whether something is computed of samples together.

    Args:
        four: What it is in the four runs.
        samples: How many there are: what is as long has a row for each.
        share: What may be due to rounding.
    """
    four = [tensor.detach() for tensor in four]
    if len({t.shape for t in four}) > 1 or not four[0].numel():
        return False
    if four[0].ndim and len(four[0]) == samples:
        on_a, on_b = depends(four, share)
        return bool((on_a & on_b).any())
    four = [t if t.is_floating_point() else t.to(torch.float32) for t in four]
    changed = (four[AB] != four[AA]) | (four[AB] != four[BB])
    rest = (four[AB] + four[BA] - four[AA] - four[BB]).abs()
    size = torch.where(changed, torch.stack([t.abs() for t in four]).amax(0), 0).max()
    return bool((rest > share * size).any() & (size > 0))


def is_separable(four: Sequence[float], share: float, summands: float = 0.0) -> bool:
    """Whether a number seems to be a sum, or a mean, of something of each sample.

    Args:
        four: What it is in the four runs.
        share: What may be due to rounding.
        summands: How large its summands are, where they may cancel each other.
    """
    numbers = torch.tensor(four, dtype=torch.float64, device="cpu")
    if not bool(numbers.isfinite().all()):  # 0 / 0, for instance, where samples are the same
        return not bool(numbers[:AA].isfinite().all() & ~numbers[AA:].isfinite().any())
    rest = float((numbers[AB] + numbers[BA] - numbers[AA] - numbers[BB]).abs())
    size, spread = max(float(numbers.abs().max()), summands), float(numbers.max() - numbers.min())
    return rest <= share * size + 1e-3 * spread


def is_of_all(four: Sequence[float], share: float, summands: float = 0.0) -> bool:
    """Whether a number is the same when samples change places, so that it isn't one of some alone.

    Args:
        four: What it is in the four runs.
        share: What may be due to rounding.
        summands: How large its summands are, where they may cancel each other.
    """
    size = max(abs(four[AB]), abs(four[BA]), summands)
    return not abs(four[AB] - four[BA]) > max(1e-4, 16 * share) * size
