"""Looks whether a step computes samples together, where it sees those of a micro-batch alone.

Then the loss of a mini-batch isn't the mean of its micro-batches' losses. The functions of the
first micro-batch's step are noted, and run again with samples exchanged; see :mod:`.replay`. And
the numbers that these are given are compared among stages; see :mod:`.step_numbers`.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import origin_of, told
from lightning_gpipe.model.step_trace import BACKBONE, StepTrace
from lightning_gpipe.strategy.batches import has_lists
from lightning_gpipe.strategy.halves import halves_of
from lightning_gpipe.strategy.noted import Noted
from lightning_gpipe.strategy.replay import CannotReplay, Replay
from lightning_gpipe.strategy.step_numbers import StepNumbers
from lightning_gpipe.strategy.step_rows import ranks_rows

_log = logging.getLogger("lightning.pytorch")
#: Elements that a step makes, and functions, up to which it runs again: that takes some times the
#: memory of the one, and half a millisecond for each of the other.
_ELEMENTS, _FUNCTIONS = 2**22, 500
_FEW = 3  # samples that a rank may happen to treat as if they were alone
_BEFORE = (
    "What stands before the backbone computes samples together{by}."
    " With step='micro-batch' it sees those of a micro-batch alone, so what comes of it"
    " differs. Mix or normalise data in on_after_batch_transfer, which sees the mini-batch, let"
    " layers compute each sample by itself, as those with batch_first=True do, or use"
    " GPipeStrategy(step='mini-batch')."
)
_VALUE = (
    "{what} isn't a mean over samples: {by} of several samples together, with"
    " step='micro-batch' of those of a micro-batch alone. Compute it in a hook, such as"
    " on_validation_epoch_end, of what the steps have returned, or use"
    " GPipeStrategy(step='mini-batch')."
)
_ROWS = (
    "{what} has rows of which each isn't of one sample: {by} of several samples together, with"
    " step='micro-batch' of those of a micro-batch alone. Return what each sample gives, and"
    " compute this of the mini-batch's in a hook, such as on_predict_batch_end, or use"
    " GPipeStrategy(step='mini-batch')."
)
_NOTHING = (
    "The loss of micro-batch {m} is NaN or infinite, and that of others isn't. A mean over nothing,"
    " such as over labels of which a micro-batch has none, is NaN: return their sum by max(count,"
    " 1), with the count as a weight, {{'loss': loss, 'weight': count}}, or use"
    " GPipeStrategy(step='mini-batch')."
)
_NOT_FINITE = (
    "The loss of every micro-batch is NaN or infinite in the first mini-batch. If it isn't with"
    " one device, it takes some of several samples, as a trimmed mean does, and of so few nothing"
    " is left: use fewer chunks, or GPipeStrategy(step='mini-batch')."
)
_UNKNOWN = (
    "With step='micro-batch' the loss must be a mean over samples or tokens, each by itself: one of"
    " several samples together, such as a contrastive loss, sees those of a micro-batch alone."
    " Here that can't be checked: %s"
)
_UNKNOWN_VALUES = (
    "With step='micro-batch' it isn't known whether these are means over samples, each by itself,"
    " and so the mini-batch's: %s. %s"
)


class Exchange:
    """Looks at the first micro-batch of the 1st, the 2nd, the 3rd, the 5th, ... mini-batch.

    Args:
        groups: This rank's. The first stage tells of what stands before the backbone, the last one
            of the rest.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._looks = groups.replica == 0 and (groups.is_first or groups.is_last)
        self._counts = Counter[str]()  # mini-batches of each kind
        self._number = 0  # of this one
        self._warned = set[str]()
        self._unknown = set[str]()  # of what it was told that it can't be checked
        self._numbers = StepNumbers()
        self._noted: list[Noted] = []
        self._rows: Sequence[Tensor] = ()
        self._samples = self._elements = 0
        self._has_lists = False
        self._trace: StepTrace | None = None
        self._loss: Tensor | None = None
        self._weight: Any = None
        self._means: Sequence[tuple[str, Tensor]] = ()
        self._cause = ""  # why the step can't run again; nothing: it can, as far as is known

    def is_due(self, kind: str) -> bool:
        """Whether a mini-batch that is about to begin is looked at.

        Args:
            kind: The kind of its steps.
        """
        self._counts[kind] += 1
        self._number = self._counts[kind]
        return is_due(self._number)

    def begin(self, rows: Sequence[Tensor], samples: int, part: Any = None) -> None:
        """Begin the step of a micro-batch.

        Args:
            rows: The tensors in it that have a row for each sample.
            samples: How many it has.
            part: It. Lists in it with an entry for each aren't exchanged.
        """
        self._has_lists = has_lists(part, samples)
        self._noted.clear()
        self._rows, self._samples, self._elements = rows, samples if self._looks else 0, 0
        self._cause = "" if samples > 1 else "A micro-batch has one sample."

    def follow(self, trace: StepTrace, ran: Ran) -> None:
        """Note what a function of the step has made; see :data:`step_trace.Follow`."""
        if self._groups.stages > 1:
            self._numbers.follow(trace, ran)
        if self._samples > 1:
            self._trace = trace
            is_here = trace.is_here(ran.made if ran.name == BACKBONE else (ran.args, ran.kwargs))
            self._noted.append(Noted.now(ran, is_here, self._groups.device))
            if is_here:
                self._elements += sum(tensor.numel() for tensor in ran.made)
            if self._has_lists and _is_of_list(ran, self._samples):
                self._cause = "It makes a tensor of what a list in the batch says of each sample."
                self._stop()
            elif self._elements > _ELEMENTS:
                self._cause = f"Outside the backbone it makes more than {_ELEMENTS:,} numbers."
                self._stop()
            elif len(self._noted) > _FUNCTIONS:
                self._cause = f"The step calls more than {_FUNCTIONS} functions."
                self._stop()

    def forget(self) -> None:
        """Let go of the step."""
        self._numbers.clear()
        self._stop()

    def _stop(self) -> None:
        self._noted.clear()
        self._rows, self._samples, self._trace = (), 0, None
        self._loss, self._weight, self._means = None, None, ()

    def end(self, loss: Tensor | None, weight: Any, means: Sequence[tuple[str, Tensor]]) -> None:
        """End the step.

        Args:
            loss: What it is trained by; None: it isn't.
            weight: How much it counts.
            means: What else comes of it that should be means over samples, and what it is.
        """
        self._loss, self._weight, self._means = loss, weight, means

    def look(self) -> str | None:
        """Warn of what the step has computed of samples together, and forget it.

        Returns:
            What has mixed samples in the loss: the name of a function, or nothing where it isn't
            known; None: nothing is known to have done so.
        """
        found, trains = self._find(names=False), self._loss is not None
        if found.mixes:
            found = self._find(names=True)
        self.forget()
        if not self._looks:
            return None
        if found.before is not None and self._groups.is_first:
            by = f": '{found.before}' makes something of several" if found.before else ""
            self._tell("", _BEFORE.format(by=by))
        if not self._groups.is_last:
            return None
        for what, name in found.means.items() if found.loss is None else ():
            is_rows = what in found.rows
            it, they_are = ("them", "they are") if is_rows else ("it", "it is")
            by = f"'{name}' computes {it}" if name else f"{they_are} computed of some, or"
            self._tell(what, (_ROWS if is_rows else _VALUE).format(what=what, by=by))
        if trains and _UNKNOWN not in self._warned:  # later ones may be a smaller rest
            self._warned.add(_UNKNOWN)
            if not found.is_known and found.before is None:
                _log.info(_UNKNOWN, self._cause or "It isn't known what it is computed of.")
        unknown = [what for what in found.unknown if what not in self._unknown]
        if unknown and self._cause:
            self._unknown.update(unknown)
            _log.info(_UNKNOWN_VALUES, "; ".join(unknown), self._cause)
        return found.loss

    def look_at(self, losses: Sequence[Tensor | None]) -> None:
        """Warn of losses of micro-batches that are NaN or infinite.

        Args:
            losses: Those of all micro-batches, once they are told.
        """
        known = [told(loss) for loss in losses if loss is not None]
        finite = [bool(loss.isfinite().all()) for loss in known]
        if not self._looks or not self._groups.is_last or all(finite):
            return
        if any(finite):
            self._tell(_NOTHING, _NOTHING.format(m=finite.index(False)))
        elif self._number == 1:
            self._tell(_NOT_FINITE, _NOT_FINITE)

    def _find(self, names: bool) -> _Found:
        """What computes samples together, as far as the step can run with its samples exchanged."""
        found = _Found()
        if self._trace is None:
            return found
        made = {id(t) for each in self._noted for t in each.ran.made} - {id(self._loss)}
        found.unknown = [what for what, value in self._means if id(value) in made]
        for halves in halves_of(self._samples, self._number):
            replay = Replay(self._trace, self._rows, halves, self._number, names)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    replay.run(self._noted)
                except CannotReplay as error:
                    self._cause = str(error)
                except Exception as error:  # any that functions raise
                    self._cause = f"Run again with other samples it fails ({error!r})."
            found.is_known |= replay.knows(self._loss, self._weight)
            found.before = _better(found.before, replay.mixer_before)
            with suppress(Exception):  # or their backwards
                found.loss = _better(found.loss, replay.mixer_of_loss(self._loss, self._weight))
                for what, value in self._means:
                    if what in found.unknown and replay.knows(value):
                        found.unknown.remove(what)
                    name = replay.mixer_of_mean(value, self._weight)
                    found.means |= {} if name is None else {what: name}
                    found.rows |= {what} if value.ndim else set()
        ranking = [each.ran.name for each in self._noted if ranks_rows(each.ran, self._samples)]
        if self._samples <= _FEW and ranking and not found.mixes:
            n, name = self._samples, ranking[0]
            self._cause = f"Micro-batches of {n} samples may not show what '{name}' does."
            found.is_known, found.unknown = False, [what for what, _ in self._means]
        return found

    def _tell(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(text, stacklevel=2)


@dataclass(slots=True)
class _Found:
    """What computes samples together: names of functions, or nothing where they aren't known.

    Args:
        before: What does so before the backbone; None: nothing.
        loss: Of which the loss comes; None: it doesn't.
        means: Of which other means come, or rows, by what they are.
        rows: Which of these are rows.
        unknown: Which means, or rows, aren't known to be computed of samples or not.
        is_known: Whether it is known what the loss is computed of.
    """

    before: str | None = None
    loss: str | None = None
    means: dict[str, str] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    is_known: bool = False

    @property
    def mixes(self) -> bool:
        """Whether anything does so."""
        return self.before is not None or self.loss is not None or bool(self.means)


def _is_of_list(ran: Ran, samples: int) -> bool:
    """Whether a function has put numbers of Python's into a tensor with a row for each sample."""
    if not any(t.ndim and len(t) == samples for t in (*ran.given, *ran.made)):
        return False
    if ran.name in ("stack", "cat"):
        return not any(t.ndim or t.requires_grad or origin_of(t) is not None for t in ran.given)
    if ran.name != "__setitem__":
        return ran.name in ("tensor", "as_tensor", "from_numpy", "asarray")
    index = ran.args[1] if isinstance(ran.args[1], tuple) else (ran.args[1],)
    return any(type(each) is int for each in index)


def _better(name: str | None, other: str | None) -> str | None:
    """That of two names which says more."""
    return name or other if other is not None else name
