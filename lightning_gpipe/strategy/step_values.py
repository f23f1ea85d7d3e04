"""What the steps of a mini-batch compute of metrics and of means, for the mini-batch as a whole.

A metric of a mini-batch is seldom the mean of those of its micro-batches, and the root of a mean is
not the mean of the roots. So what steps make of what metrics give, and of means over samples, such
as a percentage, the figure of one class or a perplexity, is computed once more, of what the
mini-batch gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.arithmetic import ADD, DIVIDE, MULTIPLY, SUBTRACT
from lightning_gpipe.model.elsewhere import writes
from lightning_gpipe.model.means import is_known_mean, is_linear, is_mean
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import origin_of, tensors_in
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.aliases import Aliases
from lightning_gpipe.strategy.counting import count_of
from lightning_gpipe.strategy.decisions import Decisions
from lightning_gpipe.strategy.one_by_one import OneByOne
from lightning_gpipe.strategy.quotients import (
    keeps_from_zero,
    product_of,
    quotient_of,
    tells_of_zero,
)
from lightning_gpipe.strategy.recipes import (
    Call,
    Computed,
    Given,
    Mean,
    Mixed,
    NoMean,
    Other,
    Recipe,
    computed,
    functions_of,
    is_sum,
    mean_of,
)
from lightning_gpipe.strategy.step_rows import (
    CHOOSING,
    are_of_features,
    chooses,
    may_be_rows,
    takes_some,
)

_MIXED = Mixed()
_FEW = 64  # elements of what is the same for all samples, and told as a mean is
#: Functions of all elements that give something else for a mini-batch than the mean of its parts'.
_OTHERS = {"max", "amax", "min", "amin", "median", "nanmedian", "quantile", "nanquantile"}
_OTHERS |= {"all", "any", "std", "var", "prod", "logsumexp", "nanmean"}
_OTHERS |= {"norm", "linalg_norm", "linalg_vector_norm"}
_TOTALS = {"sum", "nansum", "count_nonzero"}
_COPIES = {"clone", "detach"}
_OTHERWISE = "what is computed in another way, or with other numbers, in each."
#: What is taken of values by ``reduce_fx``.
_TAKEN = {"mean": "mean", "sum": "sum", "max": "largest", "min": "smallest"}
#: What changes a scalar in place, and what gives the same.
_IN_PLACE = {
    **dict.fromkeys(filter(writes, ADD), torch.add),
    **dict.fromkeys(filter(writes, SUBTRACT), torch.sub),
    **dict.fromkeys(filter(writes, MULTIPLY), torch.mul),
    **dict.fromkeys(filter(writes, DIVIDE), torch.div),
}


class StepValues:
    """Values of the steps of a mini-batch that aren't means over samples."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], Recipe]] = {}  # by id
        self._one_by_one = OneByOne(self.is_constant)
        self._chosen = set[int]()  # numbers of rows that a step has chosen
        self._distinct = set[int]()  # numbers of values, or rows, that differ
        self._aliases = Aliases()
        self.decisions = Decisions()
        self._parted: set[int] = set()  # the micro-batches whose step has taken rows of samples
        self._fixed: dict[int, ref[Tensor]] = {}  # computed of parameters alone, by id
        self._constant: dict[int, ref[Tensor]] = {}  # made of no tensors, by id
        self._looks = Counter[str]()  # at what is other than a mean, or may be
        self._warned = set[str]()  # of these
        self.samples = 0  # of the micro-batch whose step runs
        #: What the calls of metrics give for the mini-batch.
        self.of_calls: dict[Call, Sequence[Tensor]] = {}

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._known.clear()
        self._one_by_one.clear()
        self._parted.clear()
        self._chosen.clear()
        self._distinct.clear()
        self._aliases.clear()
        self.decisions.clear()
        self._fixed.clear()
        self._constant.clear()
        self.of_calls.clear()

    def give(self, call: Call, values: Any) -> None:
        """Note what a metric gives a step."""
        for i, tensor in enumerate(tensors_in(values)):
            self._note(tensor, Given(call, i))

    def follow(self, trace: StepTrace, ran: Ran) -> None:
        """Note what a function of a step has made; see :data:`step_trace.Follow`."""
        name, given, made = ran.name, ran.given, ran.made
        self.decisions.follow(trace.micro_batch, ran)
        if ran.is_free and not given:
            self._constant.update((id(tensor), ref(tensor)) for tensor in made)
        elif ran.is_free and all(map(self._is_fixed, given)):
            new = [t for t in made if all(t is not other for other in given)]  # not a parameter
            self._fixed.update((id(tensor), ref(tensor)) for tensor in new)
            return
        elif not ran.is_free:
            for tensor in made:
                self._constant.pop(id(tensor), None)
        recipes: dict[int, Recipe | None] = {}
        if self._known:
            recipes = {id(t): self.recipe_of(t) for t in given if id(t) in self._known}
        known = [recipe for recipe in recipes.values() if recipe is not None]
        samples = self._one_by_one.follow(ran, self.samples, is_of_more=bool(known))
        if samples > 1:
            value = trace.values.keep(made[0])
            self._note(made[0], Other((("sum", value),), is_sum=True, elements=samples))
            return
        if samples and not known:
            return
        if name in CHOOSING:
            self._note_rows(trace, ran)
        elif "unique" in name:
            self._distinct.update(len(tensor) for tensor in made[:1] if tensor.ndim)
        self._aliases.note(ran)
        means = [t for t in given if is_known_mean(t) and not t.ndim]
        means = [t for t in means if recipes.get(id(t)) is None]
        fixed = [t for t in given if t.numel() <= _FEW and self._is_fixed(t)]
        if not known and (not means or _may_be_mean(ran.result)):  # as of most functions
            if isinstance(ran.result, Tensor):
                found = self._reduced(trace, ran, ran.result)
                if found is None and not is_known_mean(ran.result):
                    found = quotient_of(trace, ran, {}, self.samples, self._distinct)
                self._note(ran.result, found)
            return
        if (total := product_of(trace, ran, recipes, self.samples)) is not None:
            self._note(ran.result, total)
            return
        if name in _COPIES and len(known) == len(given) == len(made):
            self._note(made[0], known[0])
            return
        is_of_metrics = any(recipe.is_of_metrics for recipe in known)
        others = [recipe for recipe in known if isinstance(recipe, Other)]
        is_free = ran.is_free
        changed = () if is_free else (*ran.args[:1], ran.kwargs.get("out"))
        is_changed = any(map(self.recipe_of, changed))
        if is_changed and name in _IN_PLACE and not given[0].ndim:
            ran, is_free = ran._replace(function=_IN_PLACE[name]), True
            self._forget(self._aliases.of(given[0]))
        elif is_changed:
            self._forget(self._known)
        if others and not is_of_metrics:
            if name in MULTIPLY and any(type(v) in (int, float) and not v for v in ran.args):
                return  # nothing is left of it
            is_whole = len(known) == len(given)
            quotient = quotient_of(trace, ran, recipes, self.samples, self._distinct)
            keeps = is_whole and is_linear(ran) and all(map(is_sum, known))
            pairs = dict.fromkeys(pair for other in others for pair in other.made)
            elements = max(other.elements for other in others)
            are_sums = is_whole and all(map(is_sum, known))
            of = others[0] if are_sums and tells_of_zero(ran) else None
            is_clamped = are_sums and keeps_from_zero(ran)
            count = trace.values.keep(given[0]) if is_clamped else None
            recipe: Recipe = quotient or Other(
                tuple(pairs), keeps, elements=elements, count=count, of=of
            )
            for tensor in made:
                if is_whole or quotient is not None or not tensor.ndim:
                    self._note(tensor, recipe)
        elif is_free and _MIXED not in known and len(known) + len(means) + len(fixed) == len(given):
            recipes.update((id(t), Mean(trace.values.keep(t), tensor=ref(t))) for t in means)
            # a mean of what is the same for all samples is that; of parameters no references
            recipes.update((id(t), Mean(trace.values.keep(t))) for t in fixed)
            for tensor, found in zip(made, computed(ran, recipes, is_of_metrics), strict=True):
                self._note(tensor, found)
        elif is_of_metrics:
            for tensor in made:
                self._note(tensor, _MIXED)

    def _note_rows(self, trace: StepTrace, ran: Ran) -> None:
        """Note that a function has taken rows of samples, or chosen some."""
        if takes_some(ran, self.samples):
            self._parted.add(trace.micro_batch)
        if chooses(ran):
            self._chosen.update(len(tensor) for tensor in ran.made if tensor.ndim)

    def _forget(self, places: Collection[int]) -> None:
        """Forget how tensors come about that may show what was changed in place, by id."""
        known = self._known.items()
        stays = {i: found for i, found in known if i not in places}
        mixed = {i: (t, _MIXED) for i, (t, r) in known if i in places and r.is_of_metrics}
        self._known = {**stays, **mixed}

    def _note(self, tensor: Tensor, recipe: Recipe | None) -> None:
        if recipe is not None:
            self._known[id(tensor)] = ref(tensor), recipe

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or computed of such alone."""
        found = self._fixed.get(id(tensor))
        return issubclass(type(tensor), nn.Parameter) or (found is not None and found() is tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor was made of no others."""
        found = self._constant.get(id(tensor))
        return found is not None and found() is tensor

    def _reduced(self, trace: StepTrace, ran: Ran, result: Tensor) -> Recipe | None:
        """What a function makes of samples, as far as it isn't known to be a plain mean."""
        name, is_total = ran.name, ran.name in _TOTALS or ran.kwargs.get("reduction") == "sum"
        if is_total or name in _OTHERS or name == "mean":
            is_mean_of = not (is_total or name in _OTHERS)
            rows, samples = ran.given[0], self.samples
            is_found = not result.ndim and not is_mean_of
            is_found = is_found and may_be_rows(rows, samples, *self._chosen)
            if trace.micro_batch not in self._parted:
                is_found = is_found or are_of_features(ran, result, samples)
            if is_found:
                value = trace.values.keep(result)
                if is_mean_of:
                    return Mean(value)
                elements = min(t.numel() for t in ran.given[:2] if t.ndim or not rows.ndim)
                return Other(((name, value),), is_total, not rows.numel(), elements)
        return _mean_made(trace, ran, result)

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
        reduction: str = "mean",
    ) -> Tensor | None:
        """A value for the mini-batch, once its means are told and its metrics are through.

        Args:
            recipes: How it comes about in each micro-batch.
            weights: How much each of them counts in means.
            what: What it is, for the warning.
            adds: Whether a sum's values are added, as whole numbers are that steps return.
            reduction: What is taken of the micro-batches' values if it isn't known.

        Returns:
            The value; None if it isn't known.
        """
        if len(recipes) == 1 or not any(recipes) or (adds and all(map(is_sum, recipes))):
            return None
        why = ""
        if None not in recipes:
            try:
                with suppress(LookupError):
                    value: Tensor = self._made(recipes, weights)
                    return value
            except NoMean as error:
                why = str(error)
        if what in self._warned:
            return None
        if any(recipe is not None and recipe.is_of_metrics for recipe in recipes):
            self._warned.add(what)
            rank_zero_warn(
                f"{what} is the mean over micro-batches of what a metric gives: it is computed of"
                " other tensors, too, changed in place, or given by some micro-batches alone. Log"
                " or return what the metric gives by itself, or use"
                " GPipeStrategy(step='mini-batch')."
            )
            return None
        if None in recipes:
            return None
        others = [recipe for recipe in recipes if isinstance(recipe, Other)]
        self._looks[what] += 1
        if why or is_due(self._looks[what]):
            text = _text(what, why, functions_of(others), reduction)
            if text is not None:
                self._warned.add(what)
                rank_zero_warn(text)
        return None

    def _made(self, recipes: Sequence[Any], weights: Sequence[float]) -> Any:
        last = recipes[-1]
        kinds = set(map(type, recipes))
        if not kinds.isdisjoint((Mixed, Other)):
            raise LookupError
        if len(kinds) > 1:
            raise NoMean(_OTHERWISE)
        if isinstance(last, Mean):
            return mean_of(recipes, weights)
        if isinstance(last, Given):
            return self.of_calls[last.call][last.output].detach().clone()
        if isinstance(last, Computed):
            leaves = [recipe.leaves for recipe in recipes]
            if any(not recipe.is_like(last) for recipe in recipes):
                raise NoMean(_OTHERWISE)
            made = [self._made(column, weights) for column in zip(*leaves, strict=True)]
            return tensors_in(last.run(made))[last.output]
        if any(recipe is not last and recipe != last for recipe in recipes):
            raise NoMean(_OTHERWISE)
        return last


def _text(what: str, why: str, functions: Sequence[str], reduction: str) -> str | None:
    """What to warn of what isn't the mean of the micro-batches' values, or their sum or so.

    Args:
        what: What it is.
        why: What these are; nothing: that isn't known.
        functions: What has made it of all samples of each.
        reduction: What is taken.
    """
    give = "else give" if why.endswith(";") else "Give"
    if functions and not why:
        why = f"what '{functions[0]}' makes of all samples of each, which isn't the mini-batch's."
        if reduction == "mean":
            why += " Log it with reduce_fx='sum', 'max' or 'min' if it is that of samples,"
            give = "give"
    if not why:
        return None
    return (
        f"{what} is the {_TAKEN[reduction]} over micro-batches of {why} {give} the scores to a"
        " metric of torchmetrics, or use GPipeStrategy(step='mini-batch')."
    )


def _mean_made(trace: StepTrace, ran: Ran, made: Tensor) -> Mean | None:
    """A mean that a function has made; None: it made something else, or a plain one.

    Args:
        trace: Follows the step.
        ran: The function.
        made: What it has made.
    """
    origin = origin_of(made)
    is_found = is_mean(ran) if origin is None else origin.is_mean
    if not is_found or made.ndim:
        return None
    count = count_of(trace, ran)
    if origin is None:  # such as one of the batch
        return Mean(made.detach().clone(), count, count is not None, True, tensor=ref(made))
    return (
        None
        if count is None
        else Mean(trace.values.keep(made), count, True, True, tensor=ref(made))
    )


def _may_be_mean(value: Any) -> bool:
    """Whether it is one if it is a scalar, which takes longer to tell."""
    return isinstance(value, Tensor) and is_known_mean(value)
