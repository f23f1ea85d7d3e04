"""What metrics give the steps of a mini-batch, and what the steps compute of it.

A metric of a mini-batch is seldom the mean of those of its micro-batches. So what steps log of a
metric, such as a percentage or the figure of one class, is computed once more, of what the metric
gives for the mini-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.model.remote import tensors_in

#: A metric, by id, and its how manieth call in a step it is.
Call: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Given:
    """What a metric has given.

    Args:
        call: To which call.
        output: Its place among the tensors that the call gave.
    """

    call: Call
    output: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What a function has made of what metrics have given.

    Args:
        function: The function.
        args: What it was given, with recipes for tensors.
        kwargs: The same.
        output: Its place among the tensors that the function made.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int


class Mixed:
    """What is computed of other tensors, too, or was changed in place."""


#: How a value comes about.
Recipe: TypeAlias = Given | Computed | Mixed
_MIXED = Mixed()


class MetricValues:
    """The values of metrics in the steps of a mini-batch."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Recipe]] = {}  # by id
        #: What the calls give for the mini-batch.
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
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, free: bool
    ) -> None:
        """Note what a function of a step makes of such values.

        Args:
            func: The function.
            args: What it was given.
            kwargs: The same.
            result: What it has made.
            free: Whether it does nothing else: it changes no tensor and draws no random number.
        """
        tensors = tensors_in((args, kwargs))
        recipes = [self.recipe_of(tensor) for tensor in tensors]
        if not any(recipes):
            return
        if not free:  # what is changed may be seen through other tensors
            self._known = {i: (tensor, _MIXED) for i, (tensor, _) in self._known.items()}
        is_alone = free and all(recipe is not None and recipe is not _MIXED for recipe in recipes)
        if is_alone:
            args, kwargs = tree_map(self._recipe_or_leaf, (args, kwargs))
        for i, tensor in enumerate(tensors_in(result)):
            if not tensor.requires_grad:  # it is no loss
                recipe = Computed(func, args, kwargs, i) if is_alone else _MIXED
                self._known[id(tensor)] = weakref.ref(tensor), recipe

    def recipe_of(self, value: Any) -> Recipe | None:
        """How a value comes about, if metrics have part in it."""
        tensor, recipe = self._known.get(id(value), (None, None))
        return recipe if tensor is not None and tensor() is value else None

    def of_mini_batch(self, recipes: Sequence[Recipe | None], what: str) -> Tensor | None:
        """A value as the mini-batch's metrics give it, once they are through.

        Args:
            recipes: How it comes about in each micro-batch.
            what: What it is, for the warning.

        Returns:
            The value; None if it has nothing to do with metrics, or isn't known.
        """
        if len(recipes) == 1 or not any(recipes):
            return None
        if None not in recipes:
            with suppress(LookupError):
                value: Tensor = self._made(recipes[-1])
                return value
        rank_zero_warn(
            f"{what} is the mean over micro-batches of what a metric gives: it is computed of other"
            " tensors, too, changed in place, or given by some micro-batches alone. Log or return"
            " what the metric gives by itself, or use GPipeStrategy(step='mini-batch')."
        )
        return None

    def _made(self, recipe: Any) -> Any:
        if isinstance(recipe, Given):
            return self.of_calls[recipe.call][recipe.output].detach().clone()
        if isinstance(recipe, Computed):
            args, kwargs = tree_map(self._made, (recipe.args, recipe.kwargs))
            return tensors_in(recipe.function(*args, **kwargs))[recipe.output]
        if recipe is _MIXED:
            raise LookupError
        return recipe

    def _recipe_or_leaf(self, leaf: Any) -> Any:
        return self.recipe_of(leaf) if isinstance(leaf, Tensor) else leaf


def outline_of(measure: Metric | MetricCollection) -> Any:
    """What a metric gives, on the meta device.

    It is a number, or one for each metric of a collection, where that can't be told without data.
    """
    own = measure.clone()
    own.reset()
    for part in own.modules():
        if isinstance(part, Metric):
            part._to_sync, part._update_count = False, 1  # or it would warn that it has no data
    try:
        return tree_map(_on_meta, own.compute())
    except Exception:  # as of metrics that keep all samples
        number = torch.empty((), device="meta")
        return dict.fromkeys(own, number) if isinstance(own, MetricCollection) else number


def _on_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
