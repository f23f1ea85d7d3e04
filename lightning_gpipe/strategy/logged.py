"""What a step logs once per micro-batch, logged once per mini-batch."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gpipe.model.remote import origin_of, told
from lightning_gpipe.model.step_trace import StepTrace
from lightning_gpipe.strategy.merging import weighted_mean
from lightning_gpipe.strategy.recipes import Mean, Other, Recipe, means_of
from lightning_gpipe.strategy.step_values import StepValues
from lightning_gpipe.tensors.default_type import default_dtype

_SIGNATURE = inspect.signature(pl.LightningModule.log)
_NAMES = dict.fromkeys(list(_SIGNATURE.parameters)[1:]).keys()
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


_NOTHING = (
    "{0} is NaN in some micro-batches and a number in others, as a mean over nothing is, such as"
    " over samples of a class of which a micro-batch has none. With step='micro-batch' the"
    " mini-batch's is NaN, too. Use a metric of torchmetrics, log a sum and a count with"
    " reduce_fx='sum', or use GPipeStrategy(step='mini-batch')."
)
_ONE_NUMBER = (
    "{0} with reduce_fx='sum' is {1} in every micro-batch, and is added up: it counts {2} times in"
    " a mini-batch. If it counts batches, or is a constant, log it in on_train_batch_end or"
    " on_validation_batch_end, which run once for each."
)
_SAMPLES = (
    "{0} is as many as each micro-batch has samples, {1} for instance, and the mean over"
    " micro-batches isn't the mini-batch's number. Log it with reduce_fx='sum', or in"
    " on_train_batch_start, which sees the mini-batch."
)


@dataclass(slots=True)
class _Entry:
    """One call of ``self.log``.

    Args:
        micro_batch: In whose step.
        value: A tensor without a graph, a number or a metric.
        options: The other arguments.
        recipe: How it comes about; None: it is a mean, or it isn't known.
        is_mean: Whether it is known to be a mean.
        is_loss: Whether it is what the step is trained by.
        is_constant: Whether it is a number, or made of such.
    """

    micro_batch: int
    value: Any
    options: dict[str, Any]
    recipe: Recipe | None
    is_mean: bool = False
    is_loss: bool = False
    is_constant: bool = True


class LoggedBefore:
    """With which batch sizes values are logged, over the mini-batches of a run, and what is said.

    A step gives the same one for all micro-batches because they are equal, or because it is a
    constant, such as the loader's batch size. A constant counts the same in every mini-batch.
    """

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}  # samples of a mini-batch, by what is logged
        self._seen: dict[str, tuple[float, int, float]] = {}
        self._numbers: dict[str, float] = {}
        self._warned = set[str]()

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(text)

    def is_again(self, name: str, number: float) -> bool:
        """Whether the same number was logged when this was asked last."""
        before, self._numbers[name] = self._numbers.get(name), number
        return before == number

    def of_mini_batch(self, name: str, sizes: Sequence[float], samples: Sequence[int]) -> int:
        """The batch size of a mini-batch.

        Args:
            name: Of the value.
            sizes: What was given for each micro-batch.
            samples: How many each has.
        """
        whole, size = sum(sizes), sizes[0]
        self._largest[name] = most = max(self._largest.get(name, 0), sum(samples))
        if len(set(sizes)) > 1:
            return int(whole)
        before, had, counted = self._seen.get(name, (size, samples[0], whole))
        if before != size:
            before, had, counted = size, samples[0], whole
        self._seen[name] = before, had, counted
        is_constant = size == most or any(one != had for one in samples)
        return int(counted if is_constant else whole)


class StepLog:
    """The calls of ``self.log`` in the steps of a mini-batch.

    Args:
        values: What steps make of metrics and means: that is logged as for the mini-batch.
        before: What calls have given in earlier mini-batches.
    """

    def __init__(self, values: StepValues, before: LoggedBefore) -> None:
        self._values = values
        self._entries: dict[tuple[str, int], list[_Entry]] = {}
        self._counts: dict[str, int] = {}
        self._micro_batch = 0
        self._means: list[tuple[str, Tensor]] | None = None
        self._before = before
        self._is_looked_at = False
        self._of_step: list[tuple[_Entry, Any]] = []
        self._default_dtype = torch.get_default_dtype()

    def begin(self, micro_batch: int, is_looked_at: bool) -> None:
        """Begin the step of a micro-batch.

        Args:
            micro_batch: Its number.
            is_looked_at: Whether it is looked at: then what it logs is kept, see :meth:`means`.
        """
        self._micro_batch = micro_batch
        self._counts.clear()
        self._means = [] if is_looked_at else None
        self._is_looked_at |= is_looked_at
        self._of_step.clear()

    def end(self, loss: Tensor | None) -> None:
        """End the step of a micro-batch.

        Args:
            loss: What is trained by; None: nothing is.
        """
        for entry, value in self._of_step:
            entry.is_loss = value is loss
        self._of_step.clear()

    def means(self) -> list[tuple[str, Tensor]]:
        """What the step has logged that should be means over samples, and what it is."""
        found, self._means = self._means or [], None
        return found

    def note(
        self, trace: StepTrace | None, module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Note a call of ``self.log``.

        Args:
            trace: Follows the step; None: nothing does.
            module: The module.
            args: The call's other arguments.
            kwargs: The same.
        """
        self._default_dtype = torch.get_default_dtype()  # that of double precision, for instance
        name, value, options = call_of(module, *args, **kwargs)
        recipe = self._values.recipe_of(value)
        entry = _Entry(self._micro_batch, value, options, recipe)
        if isinstance(value, Tensor):
            if self._means is not None and _takes_mean(entry):
                self._means += [(_what(name), mean) for mean in means_of(value, recipe)]
            origin = origin_of(value)
            is_known = origin is not None and origin.is_mean
            entry.is_constant = self._values.is_constant(value)
            entry.is_mean = is_known or _stays_mean(recipe, self._values.samples)
            entry.value = _kept(value, trace)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        self._entries.setdefault((name, count), []).append(entry)
        self._of_step.append((entry, value))

    def replay(self, log: Any, weights: Sequence[float], samples: Sequence[int]) -> None:
        """Log what was noted, once.

        Args:
            log: ``self.log`` of the module.
            weights: How much each micro-batch counts, where the call doesn't say its batch size,
                or logs what is trained by.
            samples: How many each has: by these it counts where the call says the same for all.
        """
        with default_dtype(self._default_dtype):
            self._replay(log, weights, samples)

    def _replay(self, log: Any, weights: Sequence[float], samples: Sequence[int]) -> None:
        for (name, _), entries in self._entries.items():
            options = dict(entries[0].options)
            counts = [weights[entry.micro_batch] for entry in entries]
            sizes: list[Any] = [entry.options.get("batch_size") for entry in entries]
            if None not in sizes:
                said, own = [samples[entry.micro_batch] for entry in entries], [*map(float, sizes)]
                options["batch_size"] = self._before.of_mini_batch(name, own, said)
                counts = [float(one) for one in said] if len(set(own)) == 1 else own
            if all(entry.is_loss for entry in entries):
                counts = [weights[entry.micro_batch] for entry in entries]
            value = self._of_mini_batch(name, entries, counts)
            value = _reduced(entries, counts) if value is None else value
            if self._is_looked_at:
                self._look(name, value, entries, samples)
            log(name, value, **options)

    def _look(
        self, name: str, logged: Any, entries: Sequence[_Entry], samples: Sequence[int]
    ) -> None:
        """Warn of what isn't the mini-batch's, by the values of its micro-batches."""
        values = [told(entry.value) for entry in entries]
        is_nan = [_has_nan(v) for v in (logged, *values)]
        if is_nan[0] and not all(is_nan) and not entries[0].is_loss:  # of which others tell
            self._before.warn(_NOTHING.format(_what(name)))
        if len(entries) == len(samples) > 1:
            self._look_at_numbers(name, entries, samples)

    def _look_at_numbers(
        self, name: str, entries: Sequence[_Entry], samples: Sequence[int]
    ) -> None:
        """Warn of numbers that count otherwise than in a mini-batch."""
        numbers = [_number(entry) for entry in entries]
        first, is_one = numbers[0], numbers.count(numbers[0]) == len(numbers)
        if first is None or not self._before.is_again(name, first):
            return
        if _reduction(entries[0]) == "sum" and is_one and first % samples[0]:
            self._before.warn(_ONE_NUMBER.format(_what(name), first, len(entries)))
        are_counts = numbers == [*samples] and all(type(entry.value) is int for entry in entries)
        if _takes_mean(entries[0]) and are_counts and first > 1:
            self._before.warn(_SAMPLES.format(_what(name), first))

    def _of_mini_batch(
        self, name: str, entries: Sequence[_Entry], counts: Sequence[float]
    ) -> Tensor | None:
        """What the mini-batch gives, if it is known without what was logged."""
        reduction = _reduction(entries[0])
        recipes = [None if _is_of_part(entry, reduction) else entry.recipe for entry in entries]
        return self._values.of_mini_batch(recipes, counts, _what(name), reduction=reduction)


def warn_of_layer() -> None:
    """Warn of what a layer logs, where other stages have other layers."""
    warnings.warn(
        "A layer of the backbone, or a hook of one, calls self.log. With step='micro-batch' what"
        " rank 0 logs is shown, so that what layers of other stages log is lost; nor is it known of"
        " which micro-batch it is. Return it with the backbone's output, and log it in the step.",
        stacklevel=2,
    )


def call_of(
    module: pl.LightningModule, *args: Any, **kwargs: Any
) -> tuple[str, Any, dict[str, Any]]:
    """The name and the value that a call of ``self.log`` gives, and its other arguments."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if len(given) < len(args) + len(kwargs) or not {"name", "value"} <= given.keys() <= _NAMES:
        _SIGNATURE.bind(module, *args, **kwargs)  # raises; where it needn't, it takes long
    return given.pop("name"), given.pop("value"), given


def _kept(value: Tensor, trace: StepTrace | None) -> Tensor:
    """A logged value without its graph, whatever becomes of the tensor."""
    if trace is None or origin_of(value) is None:
        return value.detach().clone()
    with trace.suspended():  # following functions takes long
        return trace.values.keep(value)


def _what(name: str) -> str:
    return f"What self.log({name!r}, ...) logs"


def _reduced(entries: Sequence[_Entry], counts: Sequence[float]) -> Any:
    """One value of those of the micro-batches, each of which counts so much in a mean."""
    values = [entry.value for entry in entries]
    if not isinstance(values[0], (Tensor, int, float)) or len(values) == 1:
        return values[0]
    if _takes_mean(entries[0]) and all(
        not isinstance(v, Tensor) and v == values[0] for v in values
    ):
        return values[0]  # a learning rate, say: no digit is lost
    tensors = [_as_tensor(value) for value in values]
    name = _reduction(entries[0])
    if name in _REDUCTIONS and not all(entry.is_mean or entry.is_loss for entry in entries):
        return _REDUCTIONS[name](torch.stack(tensors).flatten(), 0)
    floats = [t if t.is_floating_point() else t.to(torch.get_default_dtype()) for t in tensors]
    return weighted_mean(floats, counts)


def _is_of_part(entry: _Entry, reduction: str) -> bool:
    """Whether a reduction of micro-batches' values, other than the mean, gives the mini-batch's."""
    recipe = entry.recipe
    if reduction not in _REDUCTIONS or entry.is_mean:
        return False
    if reduction == "sum":  # a quotient may be one by a constant
        is_sum = isinstance(recipe, Other) and (recipe.is_sum or recipe.count is not None)
        return is_sum or isinstance(recipe, Mean)
    return isinstance(recipe, Other) and all(reduction in function for function, _ in recipe.made)


def _number(entry: _Entry) -> float | None:
    """A number that was logged, as it is or as a tensor in host memory; None: it isn't one."""
    value = entry.value
    if isinstance(value, Tensor):
        is_one = entry.is_constant and value.numel() == 1 and value.device.type == "cpu"
        return float(value) if is_one else None
    return value if type(value) in (int, float) else None


def _has_nan(value: Any) -> bool:
    """Whether a number, or one of a tensor's, is none."""
    if isinstance(value, Tensor):
        return bool(value.isnan().any())
    return isinstance(value, float) and math.isnan(value)


def _stays_mean(recipe: Recipe | None, samples: int) -> bool:
    """Whether a value is known to be a mean, and no sum that is divided by a constant.

    Args:
        recipe: How it comes about.
        samples: Of the micro-batch.
    """
    if not isinstance(recipe, Mean):
        return False
    if isinstance(recipe.divisor, Tensor):
        return recipe.counts
    return recipe.divisor is None or recipe.is_sure or recipe.divisor in (samples, recipe.elements)


def _reduction(entry: _Entry) -> str:
    """The name of what reduces a value over steps."""
    reduce = entry.options.get("reduce_fx", "mean")
    return (reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")).lower()


def _takes_mean(entry: _Entry) -> bool:
    """Whether the mean is taken of what is logged, over steps as well."""
    return entry.options.get("reduce_fx", "mean") in ("mean", torch.mean)


def _as_tensor(value: Tensor | float) -> Tensor:
    """A tensor of a value; of a number as Lightning makes one."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")
