"""What a model's loop does with its blocks, and how a stage runs its part of it."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from lightning_gpipe.model.between import run_function
from lightning_gpipe.model.run_layer import RunLayer


class Entry(NamedTuple):
    """An argument of a block or a function: a value of the loop, a tensor, or a constant."""

    tensor: int | None = None  # the number of a noted one
    constant: Any = None
    value: int | None = None  # the number of one that the stage has

    def of(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The argument.

        Args:
            values: Those that the stage has.
            tensors: The noted ones.
        """
        if self.value is not None:
            return values[self.value]
        return self.constant if self.tensor is None else tensors[self.tensor]


class Arguments(NamedTuple):
    """What something is called with, without the tensors."""

    spec: TreeSpec
    entries: tuple[Entry, ...]

    def of(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The arguments; see :meth:`Entry.of`."""
        leaves = [entry.of(values, tensors) for entry in self.entries]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


class Operation(NamedTuple):
    """A function that runs before a block.

    Args:
        name: Of the function.
        arguments: What it is called with.
    """

    name: str
    arguments: Arguments


class BlockCall(NamedTuple):
    """What a stage does to run a block.

    Its values are those that it is handed, then what the operations make of them, then the elements
    of what the block returns.

    Args:
        arguments: What the block is called with.
        operations: What runs before.
        hands: The values that it hands to the next block; of the last one, those that come out
            beside its output.
        own: The values of the block's output that the model changes in place afterwards.
        expects: The shape of the block's hidden state that the model was told before, without the
            batch's dimension; None: nothing was read of it.
        dtype: The same of its type.
    """

    arguments: Arguments
    operations: tuple[Operation, ...] = ()
    hands: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    expects: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """What the blocks are called with.

    Args:
        calls: A call per block.
        whole: Which noted tensors have a dimension of 1 in front of their own, so that none is
            taken for the batch's.
        unsplit: Which elements of the last block's tuple can't be put together from micro-batches.
        text: The program as text; travels with the values, since all stages must run the same.
    """

    calls: tuple[BlockCall, ...]
    whole: tuple[int, ...]
    unsplit: frozenset[int]
    text: str

    @classmethod
    def of(
        cls,
        calls: tuple[BlockCall, ...],
        whole: tuple[int, ...],
        unsplit: frozenset[int],
    ) -> LoopProgram:
        """The program of the calls that were noted."""
        text = _written(calls, whole, sorted(unsplit))
        return cls(calls, whole, unsplit, text)

    @classmethod
    @lru_cache(maxsize=256)
    def read(cls, text: str) -> LoopProgram:
        """The program that a text says."""
        calls, whole, unsplit = pickle.loads(base64.b64decode(text))
        return cls(calls, whole, frozenset(unsplit), text)

    @property
    def gives_more(self) -> bool:
        """Whether values come out beside the last block's output."""
        return bool(self.calls[-1].hands)

    def run(self, index: int, block: Callable[..., Any], value: Any) -> Any:
        """Run one block.

        Args:
            index: Its place.
            block: The block, or what stands in for it.
            value: What the block before hands on, the extra arguments that are tensors, and the
                text of the first stage's program.

        Returns:
            The next block's value, or the last one's output, with what comes out beside it.
        """
        handed, given, text = value
        if text != self.text:
            raise RuntimeError(
                f"Block {index} is called with other arguments on this stage than on the first one:"
                " the model must call its blocks alike on every rank."
            )
        call, values, tensors = self.calls[index], list(handed), list(given)
        for i in self.whole:
            tensors[i] = tensors[i][0]
        for operation in call.operations:
            args, kwargs = operation.arguments.of(values, tensors)
            values.append(run_function(operation.name, args, kwargs))
        args, kwargs = call.arguments.of(values, tensors)
        output = block(*args, **kwargs)
        elements = output if isinstance(output, tuple) else (output,)
        values += elements
        if call.own:
            self._check_own(index, call, values)
        if index == len(self.calls) - 1:
            made = self.without(output, None)
            return (made, self._handed(index, values)) if self.gives_more else made
        self._check(index, call, elements[0])
        return self._handed(index, values), given, text

    def without(self, output: Any, instead: Any) -> Any:
        """The last block's output with something instead of what can't be put together."""
        if not self.unsplit or not isinstance(output, tuple):
            return output
        return tuple(instead if i in self.unsplit else one for i, one in enumerate(output))

    def _handed(self, index: int, values: Sequence[Any]) -> tuple[Any, ...]:
        hands = self.calls[index].hands
        if hands and max(hands) >= len(values):
            raise RuntimeError(
                f"Block {index} returned fewer elements than the first one, in a tuple, and the"
                " model uses one of the others: let all blocks return as many."
            )
        return tuple(values[i] for i in hands)

    @staticmethod
    def _check(index: int, call: BlockCall, output: Tensor) -> None:
        """Refuse a hidden state that is other than the model's loop was told."""
        if call.expects is not None and output.shape[1:] != call.expects:
            what = f"shape {list(output.shape)}, not {[len(output), *call.expects]}"
        elif call.dtype is not None and output.dtype != call.dtype:
            what = f"{output.dtype}, not {call.dtype}"
        else:
            return
        raise RuntimeError(
            f"Block {index} returned a hidden state of {what} as it was expected to, and the model"
            " goes by this between two blocks, before it is known: read it before the first one or"
            " after the last."
        )

    @staticmethod
    def _check_own(index: int, call: BlockCall, values: Sequence[Any]) -> None:
        """Refuse a change in place of what a block has returned, where others would change, too."""
        memory = {i: v.untyped_storage()._cdata for i, v in enumerate(values) if _is_tensor(v)}
        for i in call.own:
            if any(k != i and memory.get(i) == memory.get(k) for k in call.hands):
                raise RuntimeError(
                    f"The model changes in place what block {index} has returned, which shares"
                    " memory with what is used later: write x = x + y for x += y, and functions"
                    " without inplace=True between blocks."
                )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


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
