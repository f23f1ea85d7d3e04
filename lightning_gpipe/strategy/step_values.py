"""What the steps of a mini-batch compute of metrics and of means, for the mini-batch as a whole.

A metric of a mini-batch is seldom the mean of those of its micro-batches, and the root of a mean is
not the mean of the roots. So what steps make of what metrics give, and of means over samples, such
as a percentage, the figure of one class or a perplexity, is computed once more, of what the
mini-batch gives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.means import is_known_mean, is_mean
from lightning_gpipe.model.remote import name_of, origin_of, tensors_in
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.batches import weighted_mean

#: A metric, by id, and its how manieth call in a step it is.
Call: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over the samples of a micro-batch.

    Args:
        value: A scalar.
        count: Over how many it is, where that isn't their number.
    """

    value: Tensor
    count: Tensor | None = None
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
        args: Its positional and named arguments, with recipes for tensors.
        output: Its place among the tensors that the function made.
        is_of_metrics: Whether what a metric has given is among them.
    """

    function: Any
    args: tuple[tuple[Any, ...], dict[str, Any]]
    output: int
    is_of_metrics: bool


class Mixed:
    """What is computed of what a metric has given and other tensors, or was changed in place."""

    is_of_metrics = True


@dataclass(frozen=True, slots=True)
class Other:
    """What is made of all samples of a micro-batch, and isn't their mean.

    Args:
        function: What has made it.
        results: What that has made, which is the same for all micro-batches if it is of weights.
        divisor: Of a quotient: it is a mean where this counts the samples.
    """

    function: str
    results: tuple[Tensor, ...] = ()
    divisor: Tensor | float | None = None
    is_of_metrics = False


#: How a value comes about.
Recipe: TypeAlias = Mean | Given | Computed | Mixed | Other
_MIXED = Mixed()
#: Functions of all elements that give something else for a mini-batch than the mean of its parts'.
_OTHERS = {"max", "amax", "min", "amin", "median", "nanmedian", "quantile", "nanquantile"}
_OTHERS |= {"std", "var", "prod", "logsumexp", "norm", "linalg_norm", "linalg_vector_norm"}
_SUM, _SUMS = "sum", {"sum", "nansum", "count_nonzero"}
_SKIPPING, _IGNORED = {"cross_entropy", "nll_loss"}, -100
_QUOTIENTS = {"div", "divide", "true_divide", "__truediv__"}


class StepValues:
    """Values of the steps of a mini-batch that aren't means over samples."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Recipe]] = {}  # by id
        self._looks = Counter[str]()  # at what is other than a mean, or may be
        self._warned = set[str]()  # of these
        #: Of the micro-batch whose step runs, and whether it is trained by.
        self.samples, self.trains = 0, False
        #: What the calls of metrics give for the mini-batch.
        self.of_calls: dict[Call, Sequence[Tensor]] = {}

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._known.clear()
        self.of_calls.clear()

    def give(self, call: Call, values: Any) -> None:
        """Note what a metric gives a step."""
        for i, tensor in enumerate(tensors_in(values)):
            self._known[id(tensor)] = weakref.ref(tensor), Given(call, i)

    def follow(
        self,
        trace: StepTrace,
        func: Any,
        tensors: Sequence[Tensor],
        args: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        is_free: bool,
    ) -> None:
        """Note what a function of a step has made.

        Args:
            trace: Follows the step.
            func: The function.
            tensors: Those that it was given.
            args: All that it was given.
            result: What it has made.
            is_free: Whether it does nothing else: changes no tensor, draws no random number.
        """
        recipes = {id(t): self.recipe_of(t) for t in tensors if id(t) in self._known}
        known = [recipe for recipe in recipes.values() if recipe is not None]
        if not known and _may_be_mean(result):  # as of most losses
            count = None if self.trains else _count_of(trace, func, args)
            if count is not None:
                mean = Mean(trace.values.keep(result), count)
                self._known[id(result)] = weakref.ref(result), mean
            return
        means = [t for t in tensors if recipes.get(id(t)) is None and _is_mean(t)]
        if not known and not means:  # as of most functions
            if isinstance(result, Tensor):
                if _is_mean_everywhere(func, tensors, args, result):
                    self._known[id(result)] = weakref.ref(result), Mean(result.detach().clone())
                elif (other := self._other(trace, func, tensors, args, result)) is not None:
                    self._known[id(result)] = weakref.ref(result), other
            return
        made = tensors_in(result)
        is_of_metrics = any(recipe.is_of_metrics for recipe in known)
        other = self._other_of(trace, func, known, args, result)
        if known and not is_free:  # what is changed may be seen through other tensors
            self._known = {i: (t, _MIXED) for i, (t, r) in self._known.items() if r.is_of_metrics}
        if other is not None and not is_of_metrics:
            summed = [t for t in made if self._is_of_all(t)]
            self._known.update((id(t), (weakref.ref(t), other)) for t in summed)
        elif is_free and _MIXED not in known and len(known) + len(means) == len(tensors):
            recipes.update((id(tensor), Mean(trace.values.keep(tensor))) for tensor in means)
            args = tree_map(lambda leaf: recipes.get(id(leaf), leaf), args)
            for i, tensor in enumerate(made):
                recipe = Computed(func, args, i, is_of_metrics)
                self._known[id(tensor)] = weakref.ref(tensor), recipe
        elif is_of_metrics:
            self._known.update((id(tensor), (weakref.ref(tensor), _MIXED)) for tensor in made)

    def _are_rows(self, tensor: Tensor) -> bool:
        """Whether it has rows of each sample."""
        return self.samples > 1 and tensor.ndim > 0 and len(tensor) % self.samples == 0

    def _is_of_all(self, tensor: Tensor) -> bool:
        """Whether it can't have a row, or a column, of each sample."""
        samples = self.samples
        return not tensor.ndim or (samples > 1 and all(size % samples for size in tensor.shape))

    def _other(
        self,
        trace: StepTrace,
        func: Any,
        tensors: Sequence[Tensor],
        args: tuple[tuple[Any, ...], dict[str, Any]],
        result: Tensor,
    ) -> Other | None:
        """What a function makes of tensors of which nothing is known, if it isn't a mean."""
        name, (_, kwargs) = name_of(func), args
        if name in _SUMS or kwargs.get("reduction") == "sum":
            name, is_other = _SUM, self._is_of_all(result)
        elif name in _OTHERS:
            is_other = not result.ndim
        else:
            quotient = self._quotient(trace, name, args[0], result)
            is_scaled = quotient is not None and not isinstance(quotient.divisor, Tensor)
            return None if is_scaled and result.ndim else quotient
        if is_other and self._are_rows(tensors[0]):
            return Other(name, (trace.values.keep(result),))
        return None

    def _other_of(
        self,
        trace: StepTrace,
        func: Any,
        known: Sequence[Recipe],
        args: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
    ) -> Other | None:
        """What a function makes of some that are no means."""
        others = [recipe for recipe in known if isinstance(recipe, Other)]
        if not others:
            return None
        rest = [other for other in others if not _is_sum(other)]
        if not rest and isinstance(result, Tensor):
            quotient = self._quotient(trace, name_of(func), args[0], result)
            if quotient is not None:
                return quotient
        first = (rest or others)[0]
        results = (value for other in others for value in other.results)
        return replace(first, results=tuple(dict.fromkeys(results)))

    def _quotient(
        self, trace: StepTrace, name: str, args: tuple[Any, ...], result: Tensor
    ) -> Other | None:
        """What a function has divided by something, unless it has a row of each sample."""
        if name not in _QUOTIENTS or len(args) != 2 or not self._is_of_all(result):
            return None
        divisor: Tensor | float = args[1]
        if isinstance(divisor, Tensor):
            divisor = trace.values.keep(divisor)
        return Other(name, divisor=divisor)

    def recipe_of(self, value: Any) -> Recipe | None:
        """How a value comes about; None: it is a mean, or it isn't known."""
        tensor, recipe = self._known.get(id(value), (None, None))
        return recipe if tensor is not None and tensor() is value else None

    def of_mini_batch(
        self,
        recipes: Sequence[Recipe | None],
        weights: Sequence[float],
        what: str,
        adds: bool = False,
    ) -> Tensor | None:
        """A value for the mini-batch, once its means are told and its metrics are through.

        Args:
            recipes: How it comes about in each micro-batch.
            weights: How much each of them counts in means.
            what: What it is, for the warning.
            adds: Whether a sum's values are added, as whole numbers are that steps return.

        Returns:
            The value; None if it isn't known.
        """
        if len(recipes) == 1 or not any(recipes) or (adds and all(map(_is_sum, recipes))):
            return None
        if None not in recipes:
            with suppress(LookupError):
                value: Tensor = self._made(recipes, weights)
                return value
        if any(recipe is not None and recipe.is_of_metrics for recipe in recipes):
            rank_zero_warn(
                f"{what} is the mean over micro-batches of what a metric gives: it is computed of"
                " other tensors, too, changed in place, or given by some micro-batches alone. Log"
                " or return what the metric gives by itself, or use"
                " GPipeStrategy(step='mini-batch')."
            )
        others = [recipe for recipe in recipes if isinstance(recipe, Other)]
        if len(others) < len(recipes) or what in self._warned:
            return None
        self._looks[what] += 1
        if is_due(self._looks[what]):
            self._warn(what, others, weights)
        return None

    def _warn(
        self,
        what: str,
        others: Sequence[Other],
        weights: Sequence[float],
    ) -> None:
        """Warn, once, of what isn't the mean of its micro-batches' values."""
        divisors = [other.divisor for other in others if other.divisor is not None]
        if len(divisors) == len(others):
            if _are_alike(divisors, weights):
                return
            why = (
                "quotients whose divisors aren't in proportion to their samples. If a divisor"
                " counts what the mean is over, such as tokens, give it to self.log as batch_size;"
                " else"
            )
        elif any(map(_differ, zip(*(other.results for other in others), strict=False))):
            why = (
                f"what '{others[0].function}' makes of all samples of each, which isn't the"
                " mini-batch's. Log it with reduce_fx='sum', 'max' or 'min' if it is that of"
                " samples,"
            )
        else:
            return
        self._warned.add(what)
        rank_zero_warn(
            f"{what} is the mean over micro-batches of {why} give the scores to a metric of"
            " torchmetrics, or use GPipeStrategy(step='mini-batch')."
        )

    def _made(self, recipes: Sequence[Any], weights: Sequence[float]) -> Any:
        last = recipes[-1]
        kinds = set(map(type, recipes))
        if len(kinds) > 1 or not kinds.isdisjoint((Mixed, Other)):
            raise LookupError
        if isinstance(last, Mean):
            counts = [recipe.count for recipe in recipes]
            own = None if None in counts else torch.stack(counts).tolist()
            return weighted_mean([recipe.value for recipe in recipes], own or weights)
        if isinstance(last, Given):
            return self.of_calls[last.call][last.output].detach().clone()
        if isinstance(last, Computed):
            leaves, specs = zip(*(tree_flatten(recipe.args) for recipe in recipes), strict=True)
            if any(spec != specs[-1] for spec in specs):
                raise LookupError
            made = [self._made(column, weights) for column in zip(*leaves, strict=True)]
            args, kwargs = tree_unflatten(made, specs[-1])
            return tensors_in(last.function(*args, **kwargs))[last.output]
        if any(recipe != last for recipe in recipes):
            raise LookupError
        return last


def _count_of(
    trace: StepTrace, func: Any, args: tuple[tuple[Any, ...], dict[str, Any]]
) -> Tensor | None:
    """Over how many targets a loss is a mean that leaves some out; None: it isn't known."""
    kwargs = args[1]
    if name_of(func) not in _SKIPPING or kwargs.get("weight") is not None:
        return None
    targets = args[0][1]
    if targets.is_floating_point() or trace.where(targets) is not None:
        return None
    counted: Tensor = targets != kwargs.get("ignore_index", _IGNORED)
    return counted.sum()


def _is_sum(recipe: Recipe | None) -> bool:
    """Whether a value is known to be a sum over samples."""
    return isinstance(recipe, Other) and recipe.function == _SUM


def _differ(values: tuple[Tensor, ...]) -> bool:
    return not all(torch.equal(value, values[0]) for value in values)


def _are_alike(divisors: Sequence[Tensor | float], weights: Sequence[float]) -> bool:
    """Whether all divisors are the same, or in proportion to the weights."""
    found = [torch.as_tensor(d, dtype=torch.float64).cpu() for d in divisors]
    first, weight = found[0], weights[0]
    return all(torch.equal(divisor, first) for divisor in found) or all(
        divisor.shape == first.shape and torch.allclose(divisor * weight, first * other)
        for divisor, other in zip(found, weights, strict=True)
    )


def _is_mean(tensor: Tensor) -> bool:
    """Whether it is known to be a mean over samples."""
    return _may_be_mean(tensor) and not tensor.ndim


def _may_be_mean(value: Any) -> bool:
    """Whether it is one if it is a scalar, which takes longer to tell."""
    return isinstance(value, Tensor) and is_known_mean(value)


def _is_mean_everywhere(
    func: Any, tensors: Sequence[Tensor], args: tuple[tuple[Any, ...], dict[str, Any]], made: Tensor
) -> bool:
    """Whether a function has made a mean that every stage has, as of the batch."""
    return origin_of(made) is None and not made.ndim and is_mean(name_of(func), tensors, *args)
