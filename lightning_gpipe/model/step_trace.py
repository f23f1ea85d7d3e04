"""Runs the functions that a user's step calls, as far as their arguments are on this stage.

Stages agree on what is meant by the number of a call: they run the same functions in the same
order, some of them for real and others on the meta device. What a function draws of random numbers
depends on that number alone, so it doesn't matter which stages run it.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_map, tree_unflatten

from lightning_gpipe.model.elsewhere import writes
from lightning_gpipe.model.means import is_mean
from lightning_gpipe.model.numbered import Numbered
from lightning_gpipe.model.outlines import Outlines
from lightning_gpipe.model.promise import answered
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.redirect import is_transforming
from lightning_gpipe.model.remote import (
    NotHere,
    Number,
    Origin,
    RemoteTensor,
    Where,
    destination,
    device_of,
    first_device,
    is_metadata,
    name_of,
    origin_of,
    read_metadata,
    refusal,
    tensors_given,
    tensors_in,
    told,
    wants_gradient,
)
from lightning_gpipe.model.written import Views
from lightning_gpipe.tensors.random_state import state_behind

#: Functions that may draw random numbers.
_DRAWS = re.compile(
    r"(?<!_)rand|normal(?!ize)|uniform|bernoulli|multinomial|dropout|poisson(?!_nll)|cauchy"
    r"|exponential|geometric|gumbel|rrelu|attention|lstm|gru|rnn|orthogonal|standard_gamma"
    r"|dirichlet|binomial"
)
#: Modules that ask whether all values are valid, and go on if they are.
_CHECKS = {
    "torch.distributions." + name for name in ("distribution", "geometric", "continuous_bernoulli")
}
_WITHOUT_GRADIENT = {"detach", "detach_"}
#: Functions that change their second and third argument, if they are given.
_MOVE_STATISTICS = {"batch_norm", "instance_norm"}
_OF = "_gpipe_of"
#: Python asks a remote tensor on the right first, so other stages call the one for the other.
_REFLECTED = {"gt": "lt", "ge": "le", "__gt__": "__lt__", "__ge__": "__le__"}
_NOTHING: frozenset[int] = frozenset()
#: The backbone's name, as of a function.
BACKBONE = "backbone"
#: Told of every function of a step, and of the backbone, by who follows it.
Follow: TypeAlias = Callable[["StepTrace", Ran], None]
_KEPT = (
    "'{name}' takes values of another stage and what a layer or a hook has kept of the forward,"
    " which stage {stage} alone has. Return it with the backbone's output, shape [batch, ...], and"
    " let the step use that."
)
_TRANSFORMED = (
    "'{name}' failed inside a function transform (vmap, grad and the like of torch.func), which on"
    " this stage may have been given values of another one. Compute it without, or use"
    " GPipeStrategy(step='mini-batch')."
)


@dataclass(slots=True)
class Uses:
    """On which side of the backbone a step uses which parameters.

    Args:
        parameters: Those that are watched, by ``id``.
        before: Those of which the backbone's input is computed.
        after: Those that meet something that is computed of the backbone's output.
        seen: Those that any function was given.
    """

    parameters: frozenset[int]
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The parameters of which tensors are computed."""
        found = _NOTHING
        for tensor in tensors:
            if id(tensor) in self.parameters:
                self.seen.add(id(tensor))
                found |= {id(tensor)}
            found |= tensor.__dict__.get(_OF, _NOTHING)
        return found


class StepTrace(TorchFunctionMode):
    """Follows the values of a step over the stages.

    Args:
        stage: This rank's stage.
        device: Where it computes.
        holders: The stages that hold a parameter or buffer; None: every stage.
        seed: Seeds the random generators for a micro-batch and a call in it.
    """

    def __init__(
        self,
        stage: int,
        device: torch.device,
        holders: Callable[[Tensor], Where | None],
        seed: Callable[[int, int], object],
    ) -> None:
        super().__init__()
        self.stage, self.device, self._seed = stage, device, seed
        self.holders = holders
        self.micro_batch = self._calls = 0  # whose step runs, and where it is
        # tell whether two stages have called the same functions in the same order, and with what
        self.mark = self.numbers = 0
        self.values = Numbered(stage)
        self._outlines = Outlines(device)
        self._kept: dict[int, Tensor] = {}  # by id
        self._views = Views()
        self.sources: set[int] = set()  # stages that have values which others don't
        self.uses: Uses | None = None
        self.follow: Follow | None = None
        self.is_suspended = False  # behind the backbone
        self.has_warned = False  # of numbers

    def begin(self, micro_batch: int) -> None:
        """Begin the step of a micro-batch."""
        self.micro_batch, self._calls = micro_batch, 0
        self._seed(micro_batch, 0)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run code inside this context that isn't the step's."""
        self.is_suspended = True
        try:
            with _pop_mode_temporarily():
                yield
        finally:
            self.is_suspended = False

    def arrive(self, given: list[Tensor], results: Sequence[Tensor], where: Where) -> None:
        """Go on behind the backbone.

        Args:
            given: The tensors that it was given.
            results: The tensors that came out: remote ones where they aren't here.
            where: The stages that have them.
        """
        self.made(BACKBONE, results, where)
        if self.follow is not None:
            self.follow(self, Ran(None, BACKBONE, (), {}, given, None, results, is_free=True))
        self._seed(self.micro_batch, self._calls)
        if self.uses is not None:
            self.uses.before |= self.uses.of(given)

    def made(self, name: str, results: Sequence[Tensor], where: Where) -> None:
        """Number tensors that something else than a function has made.

        Args:
            name: What has made them.
            results: The tensors: remote ones where they aren't here.
            where: The stages that have them.
        """
        self._count(name)
        for i, tensor in enumerate(results):
            self._note(tensor, Origin(Number(self.micro_batch, self._calls, i), where))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that only this stage has, and of which the others don't know."""
        self._kept.update((id(tensor), tensor) for tensor in tensors)

    def remote(self, meta: Tensor, output: int, where: Where) -> RemoteTensor:
        """A tensor that :meth:`made` is about to number, on a stage that hasn't got it."""
        number = Number(self.micro_batch, self._calls + 1, output)
        return RemoteTensor.like(meta, self.device, Origin(number, where), meta.requires_grad)

    def remotes(self, leaves: Iterable[Any], where: Where) -> list[Any]:
        """Leaves with a :meth:`remote` tensor in place of each tensor."""
        outputs = count()
        return [
            self.remote(leaf, next(outputs), where) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]

    def is_here(self, value: Any) -> bool:
        """Whether this stage has all of a value."""
        places = [self._where(tensor) for tensor in tensors_in(value)]
        return all(where is None or self.stage in where for where in places)

    def where(self, value: Any) -> Where | None:
        """The stages that have all of a value; None: every stage."""
        return self._where_all(tensors_in(value))

    def forget(self) -> None:
        """Let go of a mini-batch; what was told is everywhere."""
        self.values.clear()
        self._kept.clear()
        self._views.clear()
        self.sources.clear()
        self.mark = self.numbers = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs, answer = answered(func, types, args, kwargs or {})
        if answer is not None:
            return answer
        if is_metadata(func):
            return read_metadata(func, args, kwargs)
        name = name_of(func)
        self._count(name)
        if name == "l1_loss":
            kwargs = _with_weight(func, kwargs)
        given = tensors_given(args, kwargs)
        written = self._views.written(name, args, kwargs)
        where = self._where_all(given)
        if where is not None and not where:
            raise NotHere(_apart(name, given, self._where))
        is_kept = bool(self._kept) and any(id(tensor) in self._kept for tensor in given)
        draws = may_draw(name)
        # a generator that only some stages draw from goes on alike on all
        generator = kwargs.get("generator") if given else None
        goes_on = state_behind(generator) if isinstance(generator, torch.Generator) else None
        if where is None or self.stage in where:
            if draws:
                self._seed(self.micro_batch, self._calls)
            if any(type(tensor) is RemoteTensor for tensor in given):
                args, kwargs = tree_map(told, (args, kwargs))
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                if is_transforming():
                    raise NotHere(_TRANSFORMED.format(name=name)) from error
                raise
            # of what was told it has changed the value: other stages number the tensor
            result = next((t for t in written if told(t) is result), result)
        elif is_kept:
            raise NotHere(_KEPT.format(name=name, stage=self.stage))
        elif name == "__bool__" and sys._getframe(1).f_globals.get("__name__") in _CHECKS:
            return True  # the stage that has them looks
        else:
            result = self._remotely(func, name, args, kwargs, given, where)
        if generator is not None and goes_on is not None:
            generator.set_state(goes_on)
        made = tensors_in(result)
        if is_kept:
            self.keep(made)
        if where is None:
            self._views.note(func, given, made)
        ran = Ran(func, name, args, kwargs, given, result, made, not written and not draws)
        if where is not None or self.uses is not None:
            self._note_all(ran, written, where)
        if self.follow is not None:
            self.follow(self, ran)
        return result

    def _note_all(self, ran: Ran, written: list[Tensor], where: Where | None) -> None:
        """Note what a function has made or changed: where it is, and of which parameters."""
        of = self.uses.of(ran.given) if self.uses is not None else _NOTHING
        if self.uses is not None and where is not None:
            self.uses.after |= of
        made = [*ran.made]
        if written:
            made = [*written, *(t for t in made if all(t is not other for other in written))]
        if where is not None and ran.name in _MOVE_STATISTICS:
            made += [t for t in ran.given[1:3] if not isinstance(t, nn.Parameter)]
        is_a_mean = where is not None and is_mean(ran)
        for i, tensor in enumerate(made):
            if where is not None:
                if type(tensor) is RemoteTensor and self.stage not in where:
                    tensor.forget()
                number = Number(self.micro_batch, self._calls, i)
                self._note(tensor, Origin(number, where, is_a_mean))
            if of and id(tensor) not in (self.uses.parameters if self.uses else ()):
                tensor.__dict__[_OF] = of

    def _count(self, name: str) -> None:
        self._calls += 1
        self.mark = zlib.crc32(_mark_of(name), self.mark)

    def _where_all(self, tensors: Iterable[Tensor]) -> Where | None:
        """The stages that have all of some tensors; None: every stage."""
        found = None
        for tensor in tensors:
            where = self._where(tensor)
            if where is not None and where is not found:
                found = where if found is None else found & where
        return found

    def _where(self, tensor: Tensor) -> Where | None:
        """The stages that have a tensor's values; None: all."""
        origin = origin_of(tensor)
        if origin is None and (base := self._views.base_of(tensor)) is not None:
            origin = origin_of(base)
        if origin is None:
            return self.holders(tensor)
        is_told = type(tensor) is RemoteTensor and tensor._gpipe_value is not None
        return None if is_told and not self.values.has(tensor) else origin.where

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        self.values.note(tensor, origin)
        self.sources.add(min(origin.where))

    def _remotely(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        where: Where,
    ) -> Any:
        """Make what a function gives, without its values."""
        if (goal := destination(name, args, kwargs)) is not None:
            if device_of(inputs[0]) == goal:
                return inputs[0]
            func, args, kwargs = Tensor.to, (inputs[0], goal), {}
        to = first_device((*args, *kwargs.values(), *map(device_of, inputs)), self.device)
        keeps = torch.is_grad_enabled() and wants_gradient(inputs)
        keeps = keeps and name not in _WITHOUT_GRADIENT
        try:
            leaves, spec = self._outlines.of(func, args, kwargs)
        except NotHere:
            raise
        except Exception as error:
            raise NotHere(refusal(name, inputs[0], where)) from error
        if (out := kwargs.get("out")) is not None:
            if [t.shape for t in tensors_in(out)] != [leaf.shape for leaf in leaves]:
                raise NotHere(refusal(name, inputs[0], where))
            return out
        if writes(name):
            # noted by the caller: its value is another one from now on
            return args[0] if args else next(iter(kwargs.values()))
        if not _are_on_meta(leaves):
            raise NotHere(refusal(name, inputs[0], where))
        origin = Origin(Number(self.micro_batch, self._calls, 0), where)
        remote = partial(RemoteTensor.like, device=to, origin=origin, requires_grad=keeps)
        made = [leaf if leaf is None else remote(leaf) for leaf in leaves]
        return made[0] if spec.is_leaf() else tree_unflatten(made, spec)


@cache
def _mark_of(name: str) -> bytes:
    """What a function adds to the mark of all that were called."""
    return _REFLECTED.get(name, name).encode()


@cache
def may_draw(name: str) -> bool:
    """Whether a function may draw random numbers."""
    return _DRAWS.search(name) is not None


def _are_on_meta(leaves: Iterable[Any]) -> bool:
    """Whether leaves are tensors without values, and None, as attention returns without weights."""
    found = [leaf for leaf in leaves if leaf is not None]
    return bool(found) and all(isinstance(leaf, Tensor) and leaf.is_meta for leaf in found)


def _apart(what: str, tensors: Iterable[Tensor], where: Callable[[Tensor], Where | None]) -> str:
    places = [sorted(found) for found in map(where, tensors) if found is not None]
    return (
        f"'{what}' takes values of which stages {places} each have one: with step='micro-batch' no"
        " stage has both. For an L2 term over all weights use the optimizer's weight_decay. What"
        " is needed on both sides of the backbone is settled in the first mini-batch: a term that"
        " comes later must be there from then on, multiplied by 0. Else use"
        " GPipeStrategy(step='mini-batch')."
    )


def _with_weight(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``l1_loss`` with its ``weight``, which PyTorch 2.8 to 2.14 keeps to itself."""
    frame: FrameType | None = sys._getframe(1)
    code = getattr(func, "__code__", None)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return kwargs if frame is None else {"weight": frame.f_locals.get("weight"), **kwargs}
