"""Runs the functions of a step again, with samples exchanged; see :mod:`.halves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad  # not what stands in its place while a model trains

from lightning_gpipe.model.arithmetic import DIVIDE
from lightning_gpipe.model.means import is_mean
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import tensors_given, tensors_in
from lightning_gpipe.model.step_trace import BACKBONE, StepTrace, may_draw
from lightning_gpipe.strategy.counting import count_of
from lightning_gpipe.strategy.halves import (
    AB,
    A,
    B,
    are_reordered,
    depends,
    exchanged,
    is_of_all,
    is_separable,
    mixes,
    of_given,
    of_rows,
)
from lightning_gpipe.strategy.noted import LOW, Noted
from lightning_gpipe.strategy.repeatable import (
    are_alike,
    changed_by,
    draw_the_same,
    moves_statistics,
    only_computes,
)
from lightning_gpipe.strategy.step_rows import moves_rows
from lightning_gpipe.strategy.summands import size_of
from lightning_gpipe.tensors.default_type import default_dtype
from lightning_gpipe.tensors.random_state import seed_torch

#: What they make is the same in every step.
_REGULAR = {"arange", "eye", "full", "linspace", "logspace", "ones", "zeros"}
_EPS = 1e-7  # a share, as of a small number that keeps a divisor from being 0
#: Functions that give one of the tensors that they are given, and which.
_GIVES = {"clone": 0, "detach": 0, "where": 1}
_ORDER = "It isn't known to which samples the rows that the backbone is given belong."


class CannotReplay(RuntimeError):
    """Functions of a step can't be run again, or it isn't known what comes of that."""


@dataclass(frozen=True, slots=True)
class _Four:
    """What takes a tensor's place in the four runs.

    Args:
        values: One for each run.
        mixer: The function that has computed samples together; nothing: none has.
        counts: What it is the mean over, in each run; None: it isn't known to be a mean.
        size: How large its summands are; see :func:`size_of`.
        way: A function that has done so on the way to it, though nothing may show in it.
    """

    values: Sequence[Tensor]
    mixer: str = ""
    counts: Sequence[float] | None = None
    size: Tensor | None = None
    way: str = ""

    def mixer_on_the_way(self, names: bool) -> str | None:
        """What has come together on the way to a number that is the same in all runs.

        Nothing shows in a hinge's 0, and for other samples it may.

        Args:
            names: Whether names are known.
        """
        if len({float(value.detach()) for value in self.values}) > 1:
            return None
        return (self.way or None) if names else ""


class Replay:
    """Four runs of a step.

    Args:
        trace: The trace of the step.
        rows: The tensors of the batch that have a row for each sample.
        halves: To which half each sample belongs; see :func:`halves_of`.
        seed: Of random numbers.
        names: Whether to find the names of functions, which takes longer.
    """

    def __init__(
        self, trace: StepTrace, rows: Sequence[Tensor], halves: Tensor, seed: int, names: bool
    ) -> None:
        self._seed, self._names, self._halves = seed, names, halves
        self._trace, self._samples, self._device = trace, len(halves), trace.device
        self._rows = {id(tensor): tensor for tensor in rows}
        self._known: dict[int, _Four] = {}  # by id
        self._has_moved = False  # whether samples may have come into another order
        self._is_low = False  # whether half precision rounds them otherwise
        self._has_places = False  # whether numbers may belong to places instead of samples
        # what the backbone has given, if it can have gradients, and to which half rows belong
        self._outputs: list[tuple[Sequence[Tensor], Tensor]] = []
        #: The function that computes samples together before the backbone, or nothing where its
        #: name isn't known; None: none does.
        self.mixer_before: str | None = None

    def run(self, noted: Sequence[Noted]) -> None:
        """Run the functions of the step.

        Raises:
            CannotReplay: If some can't be run; what comes of those before is known.
        """
        self._is_low = any(e.is_here and e.rounds_to_half(self._samples) for e in noted)
        self._has_places = any(may_draw(each.ran.name) for each in noted)
        for each in noted:
            if each.ran.name == BACKBONE:
                self._pass_backbone(each)
                continue
            if each.is_here and (each.ran.given or each.ran.made):  # else it sets a mode, say
                self._run(each)
            if moves_rows(each.ran):
                self._has_moved |= not each.is_here or any(map(self._is_moved, each.ran.made))

    def knows(self, *values: Any) -> bool:
        """Whether it is known what values are in the runs."""
        return all(id(v) in self._known for v in values if isinstance(v, Tensor))

    def mixer_of_loss(self, loss: Any, weight: Any) -> str | None:
        """Which function has computed samples together, of which a loss comes.

        Args:
            loss: The loss.
            weight: How much it counts; None: by its samples.

        Returns:
            The function's name, or nothing where it isn't known; None if the loss is separable, or
            if that isn't known.
        """
        if loss is None or not self.knows(loss, weight):
            return None
        found, weights = self._known[id(loss)], self._numbers(weight)
        is_mean = self._is_separable(found, weights, of_all=not self._has_places)
        if not is_mean or self._has_mixed_gradient(found, weights):
            return found.mixer
        return found.mixer_on_the_way(self._names)

    def mixer_of_mean(self, value: Tensor, weight: Any) -> str | None:
        """The same for a scalar that counts by its samples or a weight, or for rows of samples."""
        found = self._known.get(id(value))
        if found is not None and value.shape[:1] == (self._samples,):
            are_mixed = mixes(found.values, self._samples, self._rounding(value.dtype))
            return found.mixer if are_mixed else None
        if found is None or value.ndim or not value.is_floating_point():
            return None
        ways = self._numbers(None), self._numbers(weight), found.counts or self._numbers(None)
        of_all = not self._has_places
        if not any(self._is_separable(found, way, of_all) for way in ways):
            return found.mixer
        return None if any(map(bool, found.values)) else found.mixer_on_the_way(self._names)

    def _numbers(self, value: Any) -> Sequence[float]:
        """What a number is in each run; None: 1."""
        found = self._known.get(id(value)) if value is not None else None
        if found is not None:
            return [float(each.detach()) for each in found.values]
        return [float(value) if value is not None else 1.0] * 4

    def _is_separable(self, found: _Four, weights: Sequence[float], of_all: bool = False) -> bool:
        """Whether scalars, times weights, are those of a mean over samples, and of all of these."""
        pairs = zip(found.values, weights, strict=True)
        numbers = [float(value.detach()) * weight for value, weight in pairs]
        size = 0.0 if found.size is None else abs(float(found.size) * weights[0])
        rounding = self._rounding(found.values[0].dtype)
        is_whole = not of_all or is_of_all(numbers, rounding, size)
        return is_whole and is_separable(numbers, rounding, size)

    def _rounding(self, dtype: torch.dtype) -> float:
        """What may be due to rounding, as a share of what differs."""
        if not dtype.is_floating_point:
            return 0.0
        return 0.03 if self._is_low or dtype in LOW else max(64 * torch.finfo(dtype).eps, _EPS)

    def _has_mixed_gradient(self, found: _Four, weights: Sequence[float]) -> bool:
        """Whether the derivative in a sample of the backbone's output depends on others."""
        losses = found.values
        if not losses[0].requires_grad:
            return False
        for leaves, halves in self._outputs:
            pairs = zip(losses, leaves, weights, strict=True)
            with torch.enable_grad():
                weighted = [(loss * weight, leaf) for loss, leaf, weight in pairs]
            gradients = [
                grad(loss, leaf, retain_graph=True, allow_unused=True)[0] for loss, leaf in weighted
            ]
            four = [g for g in gradients if g is not None]
            if len(four) == 4:
                on_a, on_b = depends(four, 16 * self._rounding(four[0].dtype))
                if bool(((on_b & (halves == A)) | (on_a & (halves == B))).any()):
                    return True
        return False

    def _of(self, run: int, value: Any) -> Any:
        """What takes the place of an argument in a run."""
        if isinstance(value, Tensor):
            found = self._find(value)
            return value if found is None else found.values[run]
        if type(value) in (list, tuple):
            return type(value)(self._of(run, item) for item in value)
        if type(value) is dict:
            return {key: self._of(run, item) for key, item in value.items()}
        if isinstance(value, torch.Generator):  # the step's own isn't drawn from
            return torch.Generator(value.device).manual_seed(self._seed_of_call())
        return value

    def _seed_of_call(self) -> int:
        return hash((self._seed, len(self._known)))  # the same in all runs

    def _find(self, tensor: Tensor) -> _Four | None:
        found = self._known.get(id(tensor))
        if found is None and self._rows.get(id(tensor)) is tensor:
            found = self._known[id(tensor)] = _Four(exchanged(tensor, self._halves))
        return found

    def _run(self, noted: Noted) -> None:
        """Run a function as it ran, with random numbers that are the same in all runs."""
        ran, (enabled, dtype) = noted.ran, noted.autocast
        given = [self._find(tensor) for tensor in ran.given]
        _check_writes(ran, self._known)
        context = torch.autocast(self._device.type, dtype, enabled)
        with torch.set_grad_enabled(noted.has_grad), context, default_dtype(noted.default):
            runs = [self._run_once(ran, k) for k in range(4)]
        if not ran.made and not are_alike([run.result for run in runs]):
            raise CannotReplay(f"The step reads numbers by '{ran.name}'.")
        if may_draw(ran.name) and not draw_the_same(runs):
            raise CannotReplay(f"'{ran.name}' draws other numbers for the same sample.")
        before = next((four.mixer for four in given if four is not None and four.mixer), "")
        way = next((four.way for four in given if four is not None and four.way), "")
        self._has_places |= _has_places(ran, given, self._samples)
        counts, size = _counts_of(self._trace, runs, given), self._size(ran)
        changed = [] if ran.is_free else [each for each in given[:1] if each is not None]
        for four in changed:
            self._note(ran.given[0], four.values, before or ran.name, way, None, size)
        for tensor, *values in zip(ran.made, *(run.made for run in runs), strict=True):
            self._note(tensor, values, before or ran.name, way, counts, size)

    def _size(self, ran: Ran) -> Tensor | None:
        """How large the summands are of what a function has made, if that is one tensor."""

        def find(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
            found = self._find(tensor)
            return (tensor, None) if found is None else (found.values[AB], found.size)

        size = size_of(ran, find) if len(ran.made) == 1 else None
        return size if size is not None and size.shape == ran.made[0].shape else None

    def _run_once(self, ran: Ran, k: int) -> Ran:
        of = partial(self._of, k)
        args = tuple(map(of, ran.args))
        kwargs = {name: of(value) for name, value in ran.kwargs.items()}
        if not ran.is_free:
            seed_torch(self._device, self._seed_of_call())
        result = ran.function(*args, **kwargs)
        given = tensors_given(args, kwargs)
        return Ran(ran.function, ran.name, args, kwargs, given, result, tensors_in(result), True)

    def _note(
        self,
        tensor: Tensor,
        values: Sequence[Tensor],
        mixer: str,
        way: str,
        counts: Sequence[float] | None,
        size: Tensor | None,
    ) -> None:
        share = self._rounding(tensor.dtype)
        is_mixed = self._names and mixes(values, self._samples, share)
        mixer = mixer.strip("_") if is_mixed else ""
        way = way or (mixer if tensor.ndim else "")  # not a count that is kept from being 0
        self._known[id(tensor)] = _Four(values, mixer, counts, size, way)

    def _is_moved(self, tensor: Tensor) -> bool:
        """Whether rows are in another order than samples, or it isn't known."""
        found, halves = self._known[id(tensor)], self._rows_of(tensor)
        if halves is None or len({t.shape for t in found.values}) > 1:
            return False
        own = of_given([t.detach() for t in found.values], halves, self._rounding(tensor.dtype))
        return own is None or not torch.equal(own, halves)

    def _rows_of(self, tensor: Tensor) -> Tensor | None:
        """To which half each row belongs, if there are as many for each sample."""
        return of_rows(self._halves, len(tensor)) if tensor.ndim else None

    def _pass_backbone(self, noted: Noted) -> None:
        """Look at what the backbone is given, and exchange what it has given."""
        halves = self._halves_given(noted.ran.given)
        for output in noted.ran.made if noted.is_here else ():
            length = len(output) if output.ndim else 0
            own = of_rows(halves, length) if len(halves) == self._samples else halves
            if own is None or len(own) != length:
                raise CannotReplay("The backbone's output has no rows of samples.")
            leaves = exchanged(output, own)
            if noted.has_grad and output.requires_grad:
                self._outputs.append(([leaf.requires_grad_() for leaf in leaves], own))
                with torch.enable_grad():
                    leaves = [leaf.clone() for leaf in leaves]  # functions may change them
            self._known[id(output)] = _Four(leaves)

    def _halves_given(self, given: Sequence[Tensor]) -> Tensor:
        """To which half each row belongs that the backbone is given."""
        for tensor in given:
            if id(tensor) in self._rows and id(tensor) not in self._known:
                return self._halves  # as it is in the batch
            found, halves = self._known.get(id(tensor)), self._rows_of(tensor)
            if found is None or halves is None or len({t.shape for t in found.values}) > 1:
                continue
            four, share = [t.detach() for t in found.values], self._rounding(tensor.dtype)
            if not (on := depends(four, share))[0].any() and not on[1].any():
                continue  # the same for all samples, such as a mask
            if bool((on[0] & on[1]).any()):
                if _are_columns(four, self._samples, share):
                    raise CannotReplay(_ORDER)
                self.mixer_before = None if are_reordered(four) else found.mixer
                raise CannotReplay("Samples are computed together before the backbone.")
            if (own := of_given(four, halves, share)) is None:
                raise CannotReplay(_ORDER)
            return own
        if not self._has_moved and all(t.ndim and len(t) == self._samples for t in given[:1]):
            return self._halves
        raise CannotReplay(_ORDER)


def _are_columns(four: Sequence[Tensor], samples: int, share: float) -> bool:
    """Whether dimension 1 is the batch, as of ``[time, batch, …]``: no part along it mixes halves.

    Args:
        four: The tensor in the four runs.
        samples: N.
        share: What may be due to rounding.
    """
    if four[0].ndim < 3 or four[0].shape[1] != samples:
        return False
    on_a, on_b = depends([t.transpose(0, 1) for t in four], share)
    return not bool((on_a & on_b).any())


def _check_writes(ran: Ran, known: Mapping[int, _Four]) -> None:
    """Make sure that nothing is changed but what the runs have made.

    Args:
        ran: The function.
        known: What the runs have made, by ``id``.

    Raises:
        CannotReplay: If something else would be.
    """
    if not only_computes(ran.function):
        raise CannotReplay(f"'{ran.name}' may do more than compute.")
    if moves_statistics(ran):
        raise CannotReplay("A normalisation outside the backbone is of each micro-batch.")
    for tensor in changed_by(ran):
        four = known.get(id(tensor))
        places = {t.untyped_storage().data_ptr() for t in four.values} if four else ()
        if len(places) < 4:  # something else's, which isn't a run's own
            raise CannotReplay(f"'{ran.name}' changes what the step hasn't made.")


def _has_places(ran: Ran, given: Sequence[_Four | None], samples: int) -> bool:
    """Whether a function is given, or makes, numbers of the step's own that rows may each have."""
    unknown = [t for t, four in zip(ran.given, given, strict=True) if four is None]
    made = () if ran.given or ran.name in _REGULAR else ran.made
    numbers = [t for t in (*unknown, *made) if not t.requires_grad]
    return any(t.ndim > 0 and not len(t) % samples for t in numbers)


def _counts_of(
    trace: StepTrace, runs: Sequence[Ran], given: Sequence[_Four | None]
) -> Sequence[float] | None:
    """What a function's scalar is the mean over, in each run; None: it isn't known."""
    if (place := _GIVES.get(runs[0].name)) is not None:
        same = given[place] if place < len(given) else None
        return same.counts if same is not None else None
    found = []
    for run in runs:
        if run.name in DIVIDE and len(run.args) == 2:
            count = run.args[1]
        else:
            count = count_of(trace, run) if is_mean(run) else None
        if count is None or (isinstance(count, Tensor) and count.numel() != 1):
            return None
        found.append(float(count))
    return found
