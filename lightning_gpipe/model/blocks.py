"""Layers that a model calls in a loop, with more than one argument: a Transformer's blocks.

The model's loop can't be cut, but it can be listened to. In the pipeline it meets stand-ins, which
note what each block is called with and return a promise in place of the block's output. The call of
the last one runs all blocks, on all stages.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_gpipe.tensors.tree import CONSTANTS

_PROGRAMS = 256  # that are remembered: more than a step can have calls
#: Runs the layer with an index in the backbone on what the one before returned.
RunLayer: TypeAlias = Callable[[int, Callable[..., Any], Any], Any]


class Blocks(nn.ModuleList):
    """A backbone of blocks that a model calls one after another, with masks, positions and so on.

    It takes the place of the ``nn.ModuleList`` in which the model keeps them::

        model.transformer.h = Blocks(model.transformer.h)  # GPT-2 of Hugging Face

    The model's code stays as it is, and so do the names of its parameters. Each block must get the
    hidden state that the one before returned, and nobody else may use it: blocks that are skipped,
    and hidden states that are read or changed between them, are an error. The first block gets it
    as ``hidden_states``, or as the first of its arguments that is a tensor. Other arguments may
    differ from block to block. Those whose first dimension is the batch's are split into
    micro-batches; others, such as positions ``[1, length]``, go to every micro-batch whole.

    Outside the pipeline it is an ``nn.ModuleList``.

    Args:
        blocks: Called as ``block(hidden, *extra, **more)``; hidden ``[batch, …]``.
        as_tuple: Whether a block returns a tuple, of which the model takes the first element.
    """

    def __init__(self, blocks: Iterable[nn.Module], as_tuple: bool = False) -> None:
        super().__init__(blocks)
        self.as_tuple = as_tuple
        self._loop = _Loop()
        self._programs: dict[str, _Program] = {}

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._stand_ins) if self._is_pipelined else super().__iter__()

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._stand_ins[index] if self._is_pipelined else super().__getitem__(index)

    @property
    def _is_pipelined(self) -> bool:
        return "forward" in self.__dict__

    @property
    def _stand_ins(self) -> list[Any]:
        return [_StandIn(self, i, block) for i, block in enumerate(self._modules.values())]

    def note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call of a block; the last one runs them all. Collective over the pipeline then.

        Args:
            index: The block.
            args: What it is called with.
            kwargs: The same.

        Returns:
            A promise; from the last block its output.
        """
        loop = self._loop
        if index == 0:
            _refuse_capturing()
            tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
            hidden = kwargs.get("hidden_states", next(tensors, None))
            loop = self._loop = _Loop(hidden, hidden, _modes(hidden))
        leaves, spec = tree_flatten((args, kwargs))
        place = next((i for i, leaf in enumerate(leaves) if leaf is loop.promise), None)
        if index != len(loop.calls) or place is None or not isinstance(loop.hidden, Tensor):
            raise RuntimeError(
                f"Block {index} was not called with what the one before it returned. {_CONDITION}"
            )
        if _modes(loop.hidden) != loop.modes:
            raise RuntimeError(
                f"Block {index} is called with other settings of autograd or autocast than block 0,"
                " and all run with one: call requires_grad_(False) on blocks to freeze them, and"
                " choose Trainer(precision=...) for all of them."
            )
        entries = [
            _HIDDEN if i == place else loop.entry(leaf, index) for i, leaf in enumerate(leaves)
        ]
        loop.calls.append(_Call(spec, tuple(entries)))
        if index < len(self) - 1:
            loop.promise = _Promise.of(loop)
            return (loop.promise,) if self.as_tuple else loop.promise
        program = _Program(tuple(loop.calls), tuple(sorted(loop.reads)))
        key = hashlib.blake2b(repr(program).encode(), digest_size=16).hexdigest()
        self._loop = _Loop()
        self._programs.pop(key, None)
        self._programs[key] = program  # the latest comes last
        if len(self._programs) > _PROGRAMS:  # numbers among the arguments may differ in every step
            del self._programs[next(iter(self._programs))]
        return self((loop.hidden, loop.tensors, key))

    def run(self, index: int, block: Callable[..., Any], value: Any) -> Any:
        """Run one block.

        Args:
            index: Its place.
            block: The block, or what stands in for it.
            value: What the block before returned, the extra arguments that are tensors, and which
                program they are for; see :meth:`note`.

        Returns:
            The next block's value, or the last one's output.
        """
        output, tensors, key = value
        hidden = output[0] if isinstance(output, tuple) else output
        program = self._programs[key]
        args, kwargs = program.calls[index].arguments(hidden, tensors)
        output = block(*args, **kwargs)
        if index == len(self) - 1:
            return output
        program.check(index, hidden, output[0] if isinstance(output, tuple) else output)
        return output, tensors, key


_CONDITION = (
    "Blocks are for models that call all of them in order, and hand the hidden state from one to"
    " the next untouched, without torch.utils.checkpoint around them; build the backbone as an"
    " nn.Sequential otherwise. If the blocks return tuples, give Blocks(..., as_tuple=True)."
)


def _refuse_capturing() -> None:
    """Refuse to have the blocks' outputs recorded by hooks, which see one stage's micro-batches."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is not None and collector.get():
        raise RuntimeError(
            f"The model records {', '.join(collector.get())} of its blocks, which are spread over"
            " stages: leave out output_hidden_states, output_attentions and output_router_logits."
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    """An argument of a block: one of the noted tensors, or a constant."""

    tensor: int | None
    constant: Any = None


_HIDDEN = _Entry(-1)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a block is called with, without the tensors; its ``repr`` tells calls apart."""

    spec: TreeSpec
    entries: tuple[_Entry, ...]

    def arguments(self, hidden: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """The arguments."""
        leaves = [
            hidden if e == _HIDDEN else e.constant if e.tensor is None else tensors[e.tensor]
            for e in self.entries
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True, slots=True)
class _Program:
    """What the blocks are called with, and what the model assumed of their outputs.

    Args:
        calls: A call per block.
        reads: What the model's loop read of the hidden state: its shape, its type.
    """

    calls: tuple[_Call, ...]
    reads: tuple[str, ...]

    def check(self, index: int, hidden: Tensor, output: Tensor) -> None:
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


@dataclass(slots=True)
class _Loop:
    """What is known of a loop over the blocks.

    Args:
        hidden: What the first block is called with.
        promise: What the block before has returned.
        modes: Of autograd and autocast, at the first call.
        calls: The calls so far.
        tensors: Their arguments that are tensors.
        reads: What was read of promises.
    """

    hidden: Any = None
    promise: Any = None
    modes: tuple[Any, ...] = ()
    calls: list[_Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)

    def entry(self, leaf: Any, index: int) -> _Entry:
        """How an argument is noted: tensors once, whichever blocks they are for."""
        if isinstance(leaf, _Promise):
            raise RuntimeError(
                f"Block {index} was given the output of another block than the one before it."
                f" {_CONDITION}"
            )
        if isinstance(leaf, Tensor):
            for i, known in enumerate(self.tensors):
                if known is leaf:
                    return _Entry(i)
            self.tensors.append(leaf)
            return _Entry(len(self.tensors) - 1)
        if not isinstance(leaf, CONSTANTS):
            raise TypeError(
                f"Block {index} was given a {type(leaf).__name__}, which can't be split into"
                " micro-batches. For a cache of keys and values set use_cache=False."
            )
        return _Entry(None, leaf)


class _StandIn:
    """A block as the model's loop meets it in the pipeline: of its class, with its attributes."""

    __slots__ = ("_block", "_blocks", "_index")

    def __init__(self, blocks: Blocks, index: int, block: Any) -> None:
        for name, value in (("_blocks", blocks), ("_index", index), ("_block", block)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        blocks: Blocks = self._blocks
        return blocks.note(self._index, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._block, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._block, name)

    def __repr__(self) -> str:
        return repr(self._block)


class _Promise(Tensor):
    """Stands for the output of a block until the last one is called; has no values.

    Its shape and type are those that the first block is given, and what is read of them is noted.
    """

    _reads: set[str]

    @classmethod
    def of(cls, loop: _Loop) -> _Promise:
        """The promise of the hidden state that a loop hands on."""
        promise = loop.hidden.detach().as_subclass(cls)
        promise.__dict__["_reads"] = loop.reads
        return cast(_Promise, promise)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _KNOWN:
            raise RuntimeError(
                "The hidden state between two blocks was used, which isn't known before the last"
                f" one is called. {_CONDITION}"
            )
        args[0].__dict__["_reads"].add(_KNOWN[func])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


#: What may be asked of a promise, and what is read of the hidden state then.
_KNOWN: dict[Any, str] = {
    **{getattr(Tensor, name).__get__: "device" for name in ("device", "is_meta")},
    **{getattr(Tensor, name).__get__: "shape" for name in ("shape", "ndim")},
    Tensor.size: "shape",
    Tensor.dim: "shape",
    Tensor.dtype.__get__: "dtype",  # type: ignore[attr-defined]
    Tensor.is_floating_point: "dtype",
}


def _modes(hidden: Any) -> tuple[Any, ...]:
    """The settings with which a block runs."""
    device = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    enabled = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), enabled, enabled and torch.get_autocast_dtype(device)


def run_layer(index: int, layer: Callable[..., Any], value: Any) -> Any:
    """Run a layer of an ``nn.Sequential``; see :meth:`Blocks.run`."""
    return layer(value)


def runner(backbone: nn.Module) -> RunLayer:
    """How the layers of a backbone are run."""
    return backbone.run if isinstance(backbone, Blocks) else run_layer
