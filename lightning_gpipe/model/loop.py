"""One pass of a model's loop over its blocks: what it calls them with, and how to run that."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_gpipe.model.between import PIECES, function_of, pieces
from lightning_gpipe.model.foreseen import Called, Foreseen
from lightning_gpipe.model.looks import Kind, Looks
from lightning_gpipe.model.loop_notes import INPUT, Given, LoopNotes, Value
from lightning_gpipe.model.program import LoopProgram
from lightning_gpipe.model.promise import (
    CONDITION,
    Beside,
    Promise,
    Promised,
    Unknown,
    is_promise,
    refusal,
    too_late,
)
from lightning_gpipe.model.watched import Watched
from lightning_gpipe.tensors.tree import CONSTANTS

_NO_TENSOR = (
    "The first block was called without a tensor as an argument by itself, which a loop hands on; a"
    f" tuple or a dictionary must be the only argument. {CONDITION}"
)


@dataclass(slots=True)
class Loop:
    """What is known of a loop that runs.

    Args:
        hidden: What the first block is called with.
        modes: Of autograd and autocast, at the first call.
        looks: What blocks and functions return.
        notes: What is called.
        token: Tells this pass of the loop from others.
        watched: What must stay as it is meanwhile.
        foreseen: What blocks will return.
    """

    hidden: Any
    modes: tuple[Any, ...]
    looks: Looks
    notes: LoopNotes = field(default_factory=LoopNotes)
    token: object = field(default_factory=object)
    watched: Watched = field(default_factory=Watched)
    foreseen: Foreseen = field(init=False)
    _promise: weakref.ref[Promise] | None = None  # of what the last one returns
    _promises: list[weakref.ref[Promise]] = field(default_factory=list)
    _tensors: list[tuple[Tensor, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.foreseen = Foreseen(self.hidden, self.modes[1], self.looks, self.notes)

    @classmethod
    def begin(cls, looks: Looks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loop:
        """A loop whose first block is called with these arguments."""
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        hidden = kwargs.get("hidden_states", next(tensors, None))
        loop = cls(hidden, modes_of(hidden), looks)
        loop.watched.tensor(hidden)
        return loop

    def begins(self, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the first block, or of a part of it, begins another pass."""
        leaves = tree_leaves((args, kwargs))
        is_again = len(self.notes.parts) != 1 or part in self.notes.parts[0]
        goes_on = part and any(leaf is self.hidden for leaf in leaves)
        return is_again and not goes_on and not any(map(is_promise, leaves))

    def note(
        self,
        index: int,
        part: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Value:
        """Note the call of a block, or of a part of one; returns what it makes.

        Args:
            index: The block.
            part: The part's dotted name in it; empty: the block itself.
            module: What is called.
            args: What it is called with.
            kwargs: The same.

        Raises:
            RuntimeError: If it isn't called with what the one before it returned.
            TypeError: If an argument can't be sent.
        """
        leaves, spec = tree_flatten((args, kwargs))
        if index < (due := len(self.notes.parts)) and not (part and index == due - 1):
            raise out_of_order(index, due)
        if not isinstance(self.hidden, Tensor) or not self.hidden.ndim:
            raise RuntimeError(_NO_TENSOR)
        main = self._main_of(leaves)
        if main is None:
            what = f"Block {index} was not called with what the one before it returned."
            raise RuntimeError(f"{what} {CONDITION}")
        if modes_of(self.hidden) != self.modes:
            raise other_modes(index)
        given = tuple(self._given(leaf, index) for leaf in leaves)
        value = self.notes.call(index, part, spec, given, main[0], getrefcount(leaves[main[1]]))
        self.foreseen.call(value, Called(module, leaves, spec, main[1]))
        return value

    def promise(self, value: Value) -> Promise:
        """What stands for the hidden state that the block returns, or the part, noted last."""
        promise = self._promising(value)
        self._promise = self._promises[-1]
        return promise

    def beside(self, value: Value, count: int) -> list[Any]:
        """What stands for what it returns beside its hidden state.

        A promise, if it is a tensor whose parts are the micro-batches'; None, if it is None.

        Args:
            value: What the promise of the hidden state stands for.
            count: How many elements there are.
        """
        made = list[Any]()
        for i, kind in enumerate(self.foreseen.kinds(value, count) if count else (), 1):
            element = value._replace(element=i)
            if kind is Kind.TENSOR:
                made.append(self._promising(element))
            else:
                made.append(None if kind is Kind.NOTHING else Beside(element, self.token))
        return made

    def on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Arguments with tensors on the meta device in place of promises."""
        leaves, spec = tree_flatten((args, kwargs))
        looks = [self.foreseen.look(leaf) if is_promise(leaf) else leaf for leaf in leaves]
        found_args, found_kwargs = tree_unflatten(looks, spec)
        return found_args, found_kwargs

    def read(self, promised: Promised, what: str) -> Tensor:
        """A tensor that has the shape or the type of a promise; see :meth:`Foreseen.read`."""
        return self.foreseen.read(promised, what)

    def apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a function between two blocks.

        Returns:
            The promise of its result; the one that it was given, if it changes it in place.

        Raises:
            RuntimeError: If it may not stand there.
        """
        if func in PIECES:
            return pieces(func, args, kwargs, *self.on_meta(args, kwargs))
        function = function_of(func, kwargs)
        if function is None or modes_of(self.hidden) != self.modes:
            raise refusal(func)
        if function.is_in_place and "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        leaves, spec = tree_flatten((args, kwargs))
        looks = [
            self.read(leaf._promised, "shape") if is_promise(leaf) else self.foreseen.look(leaf)
            for leaf in leaves
        ]
        are_hidden = (is_promise(leaf) or leaf is self.hidden for leaf in leaves)
        hidden = tuple(i for i, is_hidden in enumerate(are_hidden) if is_hidden)
        whole, result, is_shared = self.looks.applied(
            *(func, function, looks, hidden, spec, self.hidden.shape[0])
        )
        if function.of_samples:
            leaves, spec = tree_flatten(((args[0], result.shape[1:]), {}))
        given = tuple(
            self._given(leaf, len(self.notes.parts), i in whole) for i, leaf in enumerate(leaves)
        )
        value = self.notes.function(function.of_samples or function.name, spec, given)
        first = args[0] if args else None
        if not function.is_in_place:
            promise = self._promising(value, result)
            if is_shared:
                for one in (promise, *filter(is_promise, leaves)):
                    one._promised.is_shared = True
            return promise
        promised = first._promised if is_promise(first) else None
        if promised is None or promised.is_shared or not self.notes.change(promised.value):
            raise refusal(func, " Write x = x + y for x += y.")
        look = self.foreseen.look(promised)
        if (look.shape, look.dtype) != (result.shape, result.dtype):
            raise refusal(func)
        promised.value, promised.look = value, result
        return first

    def latest(self) -> Promise | None:
        """What the model has kept of the hidden states, the last one; None: nothing."""
        promises = (ref() for ref in reversed(self._promises))
        return next((p for p in promises if p is not None and not p._promised.value.element), None)

    def end(
        self, unsplit: frozenset[int], output: Promise | None = None
    ) -> tuple[Any, LoopProgram, list[Promise]]:
        """The value of the first block, and what to do with it.

        Args:
            unsplit: See :class:`LoopProgram`.
            output: Of what comes out where the last block is skipped; None: it isn't.

        Returns:
            The value; the program; and the promises of what comes out beside the last block's
            output.

        Raises:
            RuntimeError: If a block would meet something else than when it was called.
        """
        self.watched.check()
        promises = [p for ref in self._promises if (p := ref()) is not None]
        for promise in promises:
            promise._promised.recorder = None
        found = {p._promised.value: p for p in promises}
        wanted = self.notes.wanted(found)
        if output is not None:
            first = output._promised.value
            wanted = [first, *(value for value in wanted if value != first)]
        whole = tuple(i for i, (_, is_whole) in enumerate(self._tensors) if is_whole)
        program = LoopProgram.of(self.notes.compiled(wanted), whole, unsplit)
        self.foreseen.clear()
        tensors = [t.unsqueeze(0) if is_whole else t for t, is_whole in self._tensors]
        return ((self.hidden,), tensors, program.text), program, [found[v] for v in wanted]

    def _main_of(self, leaves: Sequence[Any]) -> tuple[Value, int] | None:
        """The value among arguments that is the hidden state, and which; None: there is none."""
        promise = self._promise() if self._promise is not None else None
        places = [i for i, leaf in enumerate(leaves) if is_promise(leaf)]
        places.sort(key=lambda i: leaves[i] is not promise)
        if places:
            return leaves[places[0]]._promised.value, places[0]
        is_first = sum(map(bool, self.notes.parts)) < 2
        places = [i for i, leaf in enumerate(leaves) if is_first and leaf is self.hidden]
        return (INPUT, places[0]) if places else None

    def _promising(self, value: Value, look: Tensor | None = None) -> Promise:
        promise = Promise.of(Promised(self, value, self.hidden.device, look))
        self._promises.append(weakref.ref(promise))
        return promise

    def _given(self, leaf: Any, index: int, is_whole: bool = False) -> Given:
        """How an argument is noted: tensors once, whichever blocks they are for.

        Args:
            leaf: It.
            index: Of the block that is called, or will be.
            is_whole: Whether it is known to be the same for all samples, if it is a tensor.
        """
        if type(leaf) is Beside and leaf.of is self.token:
            return Given(value=leaf.value)
        if type(leaf) in (Beside, Unknown):
            leaf.refuse()
        if is_promise(leaf):
            if leaf._promised.recorder is not self:
                raise too_late(f"The call of block {index}, or what stands before it,")
            return Given(value=leaf._promised.value)
        if leaf is self.hidden:
            return Given(value=INPUT)
        if isinstance(leaf, Tensor):
            for i, (known, is_known_whole) in enumerate(self._tensors):
                if known is leaf and is_known_whole == is_whole:
                    return Given(i)
            self._tensors.append((leaf, is_whole))
            self.watched.tensor(leaf)
            return Given(len(self._tensors) - 1)
        if not isinstance(leaf, (*CONSTANTS, slice, EllipsisType)):
            raise TypeError(
                f"Block {index} was given a {type(leaf).__name__}, which can't be split into"
                " micro-batches. For a cache of keys and values set use_cache=False."
            )
        return Given(None, leaf)


def out_of_order(index: int, due: int) -> RuntimeError:
    """The error of a block that is called where another would be next."""
    return RuntimeError(
        f"The step calls layer {index} of the backbone by itself, or out of order, where layer"
        f" {due} would be next: they stand on several stages, so call them in order. What else a"
        " step needs of a layer, let the layer return beside its output, or make it a module"
        f" outside the backbone. {CONDITION}"
    )


def other_modes(index: int) -> RuntimeError:
    """The error of a block that is called with other settings than the first one."""
    return RuntimeError(
        f"Block {index} is called with other settings of autograd or autocast than block 0,"
        " and all run with one: call requires_grad_(False) on blocks to freeze them, and"
        " choose Trainer(precision=...) for all of them."
    )


def modes_of(hidden: Any) -> tuple[Any, ...]:
    """The settings with which a block runs."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    enabled = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), enabled, enabled and torch.get_autocast_dtype(device)
