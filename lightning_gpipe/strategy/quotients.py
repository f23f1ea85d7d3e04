"""Sums that are divided by a count, which may be means, and means that are multiplied by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

from torch import Tensor

from lightning_gpipe.model.arithmetic import DIVIDE, MULTIPLY
from lightning_gpipe.model.means import is_known_mean
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.recipes import Mean, Other, Recipe, is_sum
from lightning_gpipe.strategy.step_rows import is_of_all

_CLAMPS = {"clamp", "clamp_min", "clip"}
_COMPARISONS = {"gt", "ne", "__gt__", "__ne__"}


def keeps_from_zero(ran: Ran) -> bool:
    """Whether a function keeps a count from being 0."""
    least: Any = ran.args[1] if len(ran.args) > 1 else ran.kwargs.get("min")
    is_clamp = ran.name in _CLAMPS and ran.kwargs.get("max") is None and len(ran.args) < 3
    return is_clamp and type(least) in (int, float) and 0 < least <= 1


def tells_of_zero(ran: Ran) -> bool:
    """Whether a function tells if a count is 0."""
    return ran.name in _COMPARISONS and [*ran.args[1:]] == [0]


def quotient_of(
    trace: StepTrace,
    ran: Ran,
    recipes: Mapping[int, Recipe | None],
    samples: int,
    distinct: Collection[int],
) -> Mean | None:
    """What a function has divided by something, if it may be a mean.

    Args:
        trace: Follows the step.
        ran: The function.
        recipes: How tensors come about that it was given, by id.
        samples: Of the micro-batch.
        distinct: Numbers of values that differ, which aren't counts to be added up.
    """
    if ran.name in DIVIDE:
        return _divided(trace, ran, recipes, samples, distinct)
    return _guarded(trace, ran, recipes) if ran.name == "where" else None


def product_of(
    trace: StepTrace, ran: Ran, recipes: Mapping[int, Recipe | None], samples: int
) -> Other | None:
    """What a function has multiplied by a count, if it was a mean: a sum; see :func:`quotient_of`.

    A whole number counts if it is that of the micro-batch's samples; 1 and 2 are seldom counts.
    """
    if ran.name not in MULTIPLY or not ran.is_free or len(ran.args) != 2:
        return None
    for mean, count in (ran.args, ran.args[::-1]):
        if not isinstance(mean, Tensor) or mean.ndim:
            continue
        recipe = recipes.get(id(mean))
        is_mean = isinstance(recipe, Mean) or (recipe is None and is_known_mean(mean))
        is_samples = type(count) is int and count == samples > 2
        if is_mean and (is_samples or is_sum(recipes.get(id(count)))):
            return Other(((ran.name, trace.values.keep(ran.result)),), is_sum=True)
    return None


def _divided(
    trace: StepTrace,
    ran: Ran,
    recipes: Mapping[int, Recipe | None],
    samples: int,
    distinct: Collection[int],
) -> Mean | None:
    if len(ran.args) != 2 or not isinstance(ran.args[0], Tensor):
        return None
    divided, (_, divisor) = recipes.get(id(ran.args[0])), ran.args
    by, is_number = recipes.get(id(divisor)), not isinstance(divisor, Tensor)
    if divided is not None and not is_sum(divided):
        return None
    if divided is None:  # rows may be divided, and what is a mean without that
        is_sum_by = by is None or is_sum(by)
        is_all = is_of_all(ran.result, samples)
        if not is_sum_by or not is_all or (is_number and ran.result.ndim):
            return None
    clamped = by.count if isinstance(by, Other) else None  # where it is 0, nothing is divided
    may_count = is_number and divisor not in distinct
    counts = divided is not None and (may_count or is_sum(by) or clamped is not None)
    kept: Tensor | float | None = clamped
    if kept is None:
        kept = divisor if is_number else trace.values.keep(divisor)
    if counts and is_number and isinstance(divided, Other) and divided.is_empty:
        kept = 0  # not 1, as of max(count, 1)
    elements = divided.elements if isinstance(divided, Other) else 0
    known = by if isinstance(by, Other) else None
    is_clamped = known is not None and not is_sum(known)
    value = trace.values.keep(ran.result)
    mean = Mean(value, kept, counts, elements=elements, is_clamped=is_clamped, by=known)
    return replace(mean, tensor=ref(ran.result))


def _guarded(trace: StepTrace, ran: Ran, recipes: Mapping[int, Recipe | None]) -> Mean | None:
    """A quotient that ``torch.where`` has taken where its divisor isn't 0."""
    if len(ran.args) != 3:
        return None
    asked, found = (recipes.get(id(argument)) for argument in ran.args[:2])
    if not isinstance(asked, Other) or not isinstance(found, Mean):
        return None
    if asked.of is None or asked.of is not found.by:
        return None
    value, place = trace.values.keep(ran.result), ref(ran.result)
    return replace(found, value=value, tensor=place, is_clamped=True)
