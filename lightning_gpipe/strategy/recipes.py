"""How values of a step come about, as far as that tells what they are for the mini-batch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import CONSTANTS, told
from lightning_gpipe.strategy.merging import weighted_mean

#: A metric, by id, and its how manieth call in a step it is.
Call: TypeAlias = tuple[int, int]


class NoMean(Exception):
    """The mini-batch's value isn't known by those of its micro-batches, with what these are."""

    def __init__(
        self,
        what: str = "quotients whose divisors aren't in proportion to their samples. If a divisor"
        " counts what the mean is over, such as tokens, give it to self.log as batch_size;",
    ) -> None:
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the samples of a micro-batch.

    Args:
        value: A scalar, or one for each feature.
        divisor: What a quotient is divided by; None: it isn't one.
        counts: Whether the divisor is added up over micro-batches, as what is divided is.
        is_sure: Whether that is known; else it is so if the divisor is a whole number.
        elements: How many were added up to what is divided; 0: it isn't known.
        is_clamped: Whether what was divided by is the divisor, but at least 1 or less, or computed
            otherwise of sums; or whether 0 stands for what would be divided by 0.
        tensor: The scalar in the step; None: it isn't known.
        by: The sum that it is divided by; None: it isn't known to be one.
    """

    value: Tensor
    divisor: Tensor | float | None = None
    counts: bool = False
    is_sure: bool = False
    elements: int = 0
    is_clamped: bool = False
    tensor: weakref.ref[Tensor] | None = field(default=None, compare=False, repr=False)
    by: Other | None = field(default=None, compare=False, repr=False)
    is_of_metrics = False


@dataclass(frozen=True, slots=True)
class Given:
    """What a metric has given.

    Args:
        call: To which call.
        output: Its place among the tensors that the call gave.
    """

    call: Call
    output: int
    is_of_metrics = True


@dataclass(frozen=True, slots=True)
class Computed:
    """What a function has made of these.

    Args:
        function: The function.
        leaves: Those of its arguments, with recipes for tensors.
        spec: How they are put together; None: they are the positional ones.
        output: Its place among the tensors that the function made.
        is_of_metrics: Whether what a metric has given is among them.
    """

    function: Any
    leaves: Sequence[Any]
    spec: TreeSpec | None
    output: int
    is_of_metrics: bool

    def is_like(self, other: Computed) -> bool:
        """Whether it is made as another one, of others perhaps."""
        kind, its = (
            (self.function, self.spec, self.output),
            (other.function, other.spec, other.output),
        )
        return kind == its and len(self.leaves) == len(other.leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the function with other leaves."""
        if self.spec is None:
            return self.function(*leaves)
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Mixed:
    """What is computed of what a metric has given and other tensors, or was changed in place."""

    is_of_metrics = True


@dataclass(frozen=True, slots=True)
class Other:
    """What is made of all samples of a micro-batch, and isn't their mean.

    Args:
        made: The functions that have made it, and what each of them gave.
        is_sum: Whether it is a sum over samples.
        is_empty: Whether it is a sum over nothing, as of what a mask chooses.
        elements: Of how many a sum is; 0: it isn't known.
        count: The sum that was clamped to 1 or less, as a count that something is divided by.
        of: The sum that was compared with 0.
    """

    made: tuple[tuple[str, Tensor], ...]
    is_sum: bool = False
    is_empty: bool = False
    elements: int = 0
    count: Tensor | None = None
    of: Other | None = field(default=None, compare=False, repr=False)
    is_of_metrics = False


#: How a value comes about.
Recipe: TypeAlias = Mean | Given | Computed | Mixed | Other


def computed(ran: Ran, recipes: Mapping[int, Recipe | None], is_of_metrics: bool) -> list[Computed]:
    """The recipes of what a function has made.

    Args:
        ran: The function.
        recipes: Those of the tensors that it was given, by id.
        is_of_metrics: Whether what a metric has given is among them.
    """
    leaves, spec = ran.args, None
    if ran.kwargs or not all(isinstance(a, Tensor) or type(a) in CONSTANTS for a in leaves):
        leaves, spec = tree_flatten((ran.args, ran.kwargs))
    leaves = [recipes.get(id(leaf), leaf) for leaf in leaves]
    return [Computed(ran.function, leaves, spec, i, is_of_metrics) for i, _ in enumerate(ran.made)]


def means_of(value: Tensor, recipe: Recipe | None) -> list[Tensor]:
    """The scalars of a step that should be means over samples, of those that make a value.

    Args:
        value: The value.
        recipe: How it comes about.
    """
    if recipe is None or isinstance(recipe, Mean):
        return [value]
    leaves = recipe.leaves if isinstance(recipe, Computed) else ()
    places = [leaf.tensor for leaf in leaves if isinstance(leaf, Mean)]
    found = [t for place in places if place is not None and (t := place()) is not None]
    nested = (means_of(value, leaf) for leaf in leaves if isinstance(leaf, Computed))
    return [*found, *(tensor for tensors in nested for tensor in tensors)]


def is_sum(recipe: Recipe | None) -> bool:
    """Whether a value is known to be a sum over samples."""
    return isinstance(recipe, Other) and recipe.is_sum


def mean_of(means: Sequence[Mean], weights: Sequence[float]) -> Tensor:
    """The mini-batch's mean of those of its micro-batches.

    Args:
        means: Those.
        weights: How much each micro-batch counts, unless that is known better.

    Raises:
        NoMean: If these are quotients whose divisors are neither whole numbers of what is counted
            nor in proportion to the weights, or sums divided by a number for all micro-batches.
    """
    values = [told(mean.value) for mean in means]
    given = [told(mean.divisor) for mean in means if mean.divisor is not None]
    if len(given) == len(means):
        divisors = _stacked(given, values[0].device)
        if _is_scaled(means, divisors, weights) or _is_by_mini_batch(means, divisors):
            raise NoMean
        is_whole = all(mean.is_sure for mean in means) or torch.equal(divisors, divisors.round())
        if all(mean.counts for mean in means) and is_whole:
            return _counted(_stacked(values, values[0].device), divisors).to(values[0].dtype)
        if any(mean.is_clamped for mean in means) or not _are_alike(divisors, weights):
            raise NoMean
    mean: Tensor = weighted_mean(values, weights)
    return mean


def _is_scaled(means: Sequence[Mean], divisors: Tensor, weights: Sequence[float]) -> bool:
    """Whether sums are divided by one number that isn't one of samples, such as 2."""
    if divisors.ndim != 1 or len(means) == 1:
        return False
    are_numbers = all(isinstance(mean.divisor, (int, float)) and mean.counts for mean in means)
    are_other = all(mean.elements and not mean.counts for mean in means)
    is_one = (are_numbers or are_other) and bool((divisors == divisors[0]).all())
    return is_one and bool(divisors[0] % (weights[0] or 1) != 0)


def _is_by_mini_batch(means: Sequence[Mean], divisors: Tensor) -> bool:
    """Whether sums are divided by the number of elements that all of them have together."""
    elements = [mean.elements for mean in means]
    if divisors.ndim != 1 or not all(elements) or len(means) == 1:
        return False
    return bool((divisors == sum(elements)).all())


def _stacked(values: Sequence[Any], device: torch.device) -> Tensor:
    """Values as numbers that count exactly."""
    tensors = [torch.as_tensor(value, device=device) for value in values]
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise NoMean
    stacked = torch.stack(tensors)
    if stacked.is_complex():  # it can't count
        raise NoMean
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32))


def _counted(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of means over so many: nothing counts where there was none."""
    missing = [1] * (values.ndim - counts.ndim)
    counts = counts.view(len(counts), *missing, *counts.shape[1:])
    # where nothing is counted there is 0, of a clamped count, or NaN; else a sum that isn't known
    if bool(((counts == 0) & (values != 0) & ~values.isnan()).any()):
        raise NoMean
    if not counts.any():
        return values[0]
    sums = torch.where(counts == 0, torch.zeros_like(values), values * counts)
    return sums.sum(0) / counts.sum(0)


def functions_of(others: Sequence[Other]) -> list[str]:
    """The functions that have given something else in one micro-batch than in another.

    What is computed of weights is the same in all.
    """
    uses = zip(*(other.made for other in others), strict=False)
    return [use[0][0] for use in uses if not all(torch.equal(value, use[0][1]) for _, value in use)]


def _are_alike(divisors: Tensor, weights: Sequence[float]) -> bool:
    """Whether all divisors are the same, or in proportion to the weights."""
    counts = _stacked(weights, divisors.device)
    if not counts.any():
        return True
    divisors, counts = divisors[counts != 0], counts[counts != 0]  # others don't matter
    first = divisors[:1]
    by_weight = (first * counts.view(-1, *[1] * (divisors.ndim - 1))).to(first.dtype)
    is_one = torch.equal(divisors, first.expand_as(divisors))
    return is_one or torch.allclose(divisors * counts[0], by_weight)
