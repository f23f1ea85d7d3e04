"""One pass of a model's loop over its blocks: what it calls them with, and how to run that."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_gpipe.model.places import Place, has_buffers, has_changed
from lightning_gpipe.model.promise import CONDITION, Beside, Promise, Unknown
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.model.snapshot import Snapshot
from lightning_gpipe.tensors.tree import CONSTANTS


class Entry(NamedTuple):
    """An argument of a block: an element of what the one before returned, a tensor, a constant."""

    tensor: int | None = None  # the number of a noted one
    constant: Any = None
    element: int | None = None


_HIDDEN = Entry(element=0)
_LATER = "in the pipeline all blocks run then."


class BlockCall(NamedTuple):
    """What a block is called with, without the tensors."""

    spec: TreeSpec
    entries: tuple[Entry, ...]

    def arguments(self, before: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, Any]:
        """The arguments.

        Args:
            before: The hidden state, and what else the block before returned.
            tensors: The noted ones.
        """
        leaves = [
            before[e.element]
            if e.element is not None
            else e.constant
            if e.tensor is None
            else tensors[e.tensor]
            for e in self.entries
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """What the blocks are called with, and what the model assumed of their outputs.

    Args:
        calls: A call per block.
        reads: What the model's loop read of the hidden state: its shape, its type.
        unsplit: Which elements of the last block's tuple can't be put together from micro-batches.
        text: The program as text; travels with the values, since all stages must run the same.
    """

    calls: tuple[BlockCall, ...]
    reads: tuple[str, ...]
    unsplit: frozenset[int]
    text: str

    @classmethod
    def of(
        cls, calls: tuple[BlockCall, ...], reads: tuple[str, ...], unsplit: frozenset[int]
    ) -> LoopProgram:
        """The program of the calls that were noted."""
        return cls(calls, reads, unsplit, _written(calls, reads, sorted(unsplit)))

    @classmethod
    @lru_cache(maxsize=256)
    def read(cls, text: str) -> LoopProgram:
        """The program that a text says."""
        calls, reads, unsplit = pickle.loads(base64.b64decode(text))
        return cls(calls, reads, frozenset(unsplit), text)

    def run(self, index: int, block: Callable[..., Any], value: Any) -> Any:
        """Run one block.

        Args:
            index: Its place.
            block: The block, or what stands in for it.
            value: What the block before returned, the extra arguments that are tensors, and the
                text of the first stage's program.

        Returns:
            The next block's value, or the last one's output.
        """
        output, tensors, text = value
        if text != self.text:
            raise RuntimeError(
                f"Block {index} is called with other arguments on this stage than on the first one:"
                " the model must call its blocks alike on every rank."
            )
        before = output if isinstance(output, tuple) else (output,)
        args, kwargs = self.calls[index].arguments(before, tensors)
        output = block(*args, **kwargs)
        if index == len(self.calls) - 1:
            return self.without(output, None)
        self._check(index, before[0], output[0] if isinstance(output, tuple) else output)
        return output, tensors, text

    def without(self, output: Any, instead: Any) -> Any:
        """The last block's output with something instead of what can't be put together."""
        if not self.unsplit or not isinstance(output, tuple):
            return output
        return tuple(instead if i in self.unsplit else one for i, one in enumerate(output))

    def _check(self, index: int, hidden: Tensor, output: Tensor) -> None:
        """Refuse a hidden state that is other than the model's loop was told."""
        before, after = hidden.shape[1:], output.shape[1:]
        if "shape" in self.reads and after != before:
            what = f"shape {list(output.shape)}, not {[len(output), *before]}"
        elif "dtype" in self.reads and output.dtype != hidden.dtype:
            what = f"{output.dtype}, not {hidden.dtype}"
        else:
            return
        raise RuntimeError(
            f"Block {index} returned a hidden state of {what} as it was given, and the model read"
            " this between two blocks, before it is known: read it before the first one or after"
            " the last."
        )


def of_any_loop(run_layer: RunLayer) -> RunLayer:
    """What runs layers, for several loops: of each the program is run that its values bring."""
    return _run_as_told if is_loop(run_layer) else run_layer


def is_loop(run_layer: RunLayer) -> bool:
    """Whether what runs layers is the program of a loop."""
    return isinstance(getattr(run_layer, "__self__", None), LoopProgram)


def _run_as_told(index: int, block: Callable[..., Any], value: Any) -> Any:
    return LoopProgram.read(value[2]).run(index, block, value)


def _written(*program: Any) -> str:
    """A program as text, the same for programs that are the same."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # the same whether or not two equal parts are one object
    pickler.dump(program)
    return base64.b64encode(file.getvalue()).decode()


@dataclass(slots=True)
class WatchedPlace:
    """A place that must be the same when a block is called and when the last one is.

    Args:
        place: The place.
        snapshot: Of which names stand there; None: of none so far, or there are tensors.
    """

    place: Place
    snapshot: Snapshot | None = None

    def now(self) -> tuple[Snapshot | None, Any]:
        """What stands there, for :meth:`has_changed`."""
        snapshot = self.snapshot
        values = snapshot.values() if snapshot is not None else None
        if snapshot is None or has_buffers(self.place) or not snapshot.is_same(values):
            self.snapshot = snapshot = Snapshot.without_values(self.place)
            values = snapshot.values() if snapshot is not None else None
        return (None, self.place.contents()) if values is None else (snapshot, values)

    def has_changed(self, snapshot: Snapshot | None, before: Any) -> bool:
        """Whether something else stands there than when :meth:`now` gave this."""
        if snapshot is not None:
            if snapshot.is_still(before) and not has_buffers(self.place):
                return False
            before = {name: (v, None) for name, v in zip(snapshot.names, before, strict=True)}
        return has_changed(before, self.place.contents())


@dataclass(slots=True)
class Loop:
    """What is known of a loop that runs.

    Args:
        hidden: What the first block is called with.
        promise: What the block before has returned.
        modes: Of autograd and autocast, at the first call.
        calls: The calls so far.
        tensors: Their arguments that are tensors.
        reads: What was read of promises.
    """

    hidden: Any
    promise: Any
    modes: tuple[Any, ...]
    calls: list[BlockCall] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)  # when they were given
    _attributes: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    _places: list[list[tuple[WatchedPlace, Any, Any]]] = field(default_factory=list)

    @classmethod
    def begin(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loop:
        """A loop whose first block is called with these arguments."""
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        hidden = kwargs.get("hidden_states", next(tensors, None))
        return cls(hidden, hidden, _modes(hidden))

    def note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the call of a block.

        Raises:
            RuntimeError: If it isn't called with what the one before it returned.
            TypeError: If an argument can't be sent.
        """
        leaves, spec = tree_flatten((args, kwargs))
        place = next((i for i, leaf in enumerate(leaves) if leaf is self.promise), None)
        if index != len(self.calls):
            raise RuntimeError(
                f"The step calls layer {index} of the backbone by itself, or out of order, where"
                f" layer {len(self.calls)} would be next: they stand on several stages, so call"
                " them all, in order. What else a step needs of a layer, let the layer return"
                f" beside its output, or make it a module outside the backbone. {CONDITION}"
            )
        if not isinstance(self.hidden, Tensor):
            raise RuntimeError(
                "The first block was called without a tensor as an argument by itself, which a loop"
                f" hands on: a tuple goes through an nn.Sequential alone. {CONDITION}"
            )
        if place is None:
            raise RuntimeError(
                f"Block {index} was not called with what the one before it returned. {CONDITION}"
            )
        if _modes(self.hidden) != self.modes:
            raise RuntimeError(
                f"Block {index} is called with other settings of autograd or autocast than block 0,"
                " and all run with one: call requires_grad_(False) on blocks to freeze them, and"
                " choose Trainer(precision=...) for all of them."
            )
        entries = [
            _HIDDEN if i == place else self._entry(leaf, index) for i, leaf in enumerate(leaves)
        ]
        self.calls.append(BlockCall(spec, tuple(entries)))

    def note_block(self, block: nn.Module, places: Sequence[WatchedPlace]) -> None:
        """Note with which attributes a block was called, and with what in other places.

        Args:
            block: The block.
            places: What it can change and read besides.
        """
        self._attributes.append((block, _constants_of(block)))
        self._places.append([(place, *place.now()) for place in places])

    def next_promise(self) -> Promise:
        """What the block that was noted last returns."""
        self.promise = promise = Promise.of(self.hidden, self.reads)
        return promise

    def end(self, unsplit: frozenset[int]) -> tuple[Any, LoopProgram]:
        """The value of the first block, and what to do with it.

        Args:
            unsplit: See :class:`LoopProgram`.

        Raises:
            RuntimeError: If a block would meet something else than when it was called.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "A tensor that a block was called with was changed in place before the last block"
                f" was called, and {_LATER} Give each block a tensor of its own, such as a clone."
            )
        for index, (block, before) in enumerate(self._attributes):
            now = _constants_of(block)
            changed = [name for name in before if now.get(name) not in (before[name],)]
            changed += [p.place.name for p, *seen in self._places[index] if p.has_changed(*seen)]
            if changed:
                raise RuntimeError(
                    f"Block {index} had another value of {', '.join(changed)} when it was called"
                    f" than when the last block was called, and {_LATER} Don't change it in the"
                    " loop after the block's call, or give it to the block as an argument."
                )
        program = LoopProgram.of(tuple(self.calls), tuple(sorted(self.reads)), unsplit)
        return (self.hidden, self.tensors, program.text), program

    def _entry(self, leaf: Any, index: int) -> Entry:
        """How an argument is noted: tensors once, whichever blocks they are for."""
        if type(leaf) is Beside and leaf.block == index - 1:
            return Entry(element=leaf.element)
        if type(leaf) in (Beside, Unknown):
            leaf.refuse()
        if isinstance(leaf, Promise):
            raise RuntimeError(
                f"Block {index} was given the output of another block than the one before it, or"
                f" that of this one twice: make it a module that takes it once. {CONDITION}"
            )
        if isinstance(leaf, Tensor):
            for i, known in enumerate(self.tensors):
                if known is leaf:
                    return Entry(i)
            self.tensors.append(leaf)
            if not leaf.is_inference():
                self._versions.append((leaf, leaf._version))
            return Entry(len(self.tensors) - 1)
        if not isinstance(leaf, CONSTANTS):
            raise TypeError(
                f"Block {index} was given a {type(leaf).__name__}, which can't be split into"
                " micro-batches. For a cache of keys and values set use_cache=False."
            )
        return Entry(None, leaf)


def _constants_of(block: nn.Module) -> dict[str, Any]:
    """The plain values among a block's attributes, its training mode too."""
    attributes = vars(block).items()
    return {
        name: value
        for name, value in attributes
        if type(value) in (bool, int, float, str) and not name.startswith("_")
    }


def _modes(hidden: Any) -> tuple[Any, ...]:
    """The settings with which a block runs."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    enabled = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), enabled, enabled and torch.get_autocast_dtype(device)
