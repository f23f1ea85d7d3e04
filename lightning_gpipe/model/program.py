"""What a model's loop does with its blocks, and how a stage runs its part of it."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from lightning_gpipe.model.between import run_function
from lightning_gpipe.model.run_layer import RunLayer

#: What to do where blocks are skipped and other values come out of the loop.
ADD_RESIDUALS = (
    " Let blocks add their residuals themselves, hidden = block(hidden), or use"
    " GPipeStrategy(step='mini-batch')."
)


class Entry(NamedTuple):
    """An argument of a block or a function: a value of the loop, a tensor, or a constant.

    Args:
        tensor: The number of a noted one.
        constant: The constant.
        value: The number of a value that the stage has.
        element: Which element it is, where the value is what a block returns.
    """

    tensor: int | None = None
    constant: Any = None
    value: int | None = None
    element: int | None = None

    def of(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """The argument.

        Args:
            values: Those that the stage has.
            tensors: The noted ones.
        """
        if self.value is None:
            return self.constant if self.tensor is None else tensors[self.tensor]
        value = values[self.value]
        return value if self.element is None else _elements(value, self.element + 1)[self.element]


class Arguments(NamedTuple):
    """What something is called with, without the tensors."""

    spec: TreeSpec
    entries: tuple[Entry, ...]

    def of(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Any, Any]:
        """The arguments, and their leaves; see :meth:`Entry.of`."""
        leaves = [entry.of(values, tensors) for entry in self.entries]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs, leaves

    def are_still(self, args: Any, kwargs: Any, leaves: Sequence[Any]) -> bool:
        """Whether lists and dictionaries among arguments hold what they held."""
        if not any(isinstance(value, (list, dict, tuple)) for value in (*args, *kwargs.values())):
            return True
        now, spec = tree_flatten((args, kwargs))
        return spec == self.spec and all(a is b for a, b in zip(now, leaves, strict=True))


class Expected(NamedTuple):
    """What the model was told of what a block returns, before it ran.

    Args:
        element: Its place among the leaves; 0: the hidden state.
        shape: With -1 for the batch's dimension, as long as the hidden state's; None: it is None.
        dtype: Its type; None: that wasn't read.
    """

    element: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None = None


class Operation(NamedTuple):
    """A call of a block, of a part of it, or of a function that runs before it.

    Args:
        function: Its name; None: it isn't one.
        part: The part's dotted name in the block; empty: the block itself.
        arguments: What it is called with.
        own: The elements of what the block returns that the model changes in place afterwards.
        expects: What the model was told before of what the block returns.
        spec: The structure in which, as text; empty: a tensor; None: it isn't known.
    """

    function: str | None
    part: str
    arguments: Arguments
    own: tuple[int, ...] = ()
    expects: tuple[Expected, ...] = ()
    spec: str | None = None


class BlockCall(NamedTuple):
    """What a stage does to run a block.

    Its values are those that it is handed, then what the operations make, of which the last one is
    the block or a part of it, unless the loop skips it.

    Args:
        operations: What runs, in order.
        hands: The values that it hands to the next block; of the last one, those that come out
            beside its output. That is the first of them, if it is skipped.
    """

    operations: tuple[Operation, ...]
    hands: tuple[Entry, ...] = ()

    @property
    def is_skipped(self) -> bool:
        """Whether the block doesn't run."""
        return all(operation.function is not None for operation in self.operations)


@dataclass(frozen=True, slots=True)
class LoopProgram:
    """What the blocks are called with.

    Args:
        calls: A call per block.
        whole: Which noted tensors have a dimension of 1 in front of their own, so that none is
            taken for the batch's.
        unsplit: Which elements of the last block's output can't be put together from micro-batches.
        text: The program as text; travels with the values, since all stages must run the same.
        kind: A text that those have in common that differ in the blocks that are skipped alone.
    """

    calls: tuple[BlockCall, ...]
    whole: tuple[int, ...]
    unsplit: frozenset[int]
    text: str
    kind: str

    @classmethod
    def of(
        cls,
        calls: tuple[BlockCall, ...],
        whole: tuple[int, ...],
        unsplit: frozenset[int],
    ) -> LoopProgram:
        """The program of the calls that were noted."""
        text = _written(calls, whole, sorted(unsplit))
        return cls(calls, whole, unsplit, text, kind=text)

    @classmethod
    @lru_cache(maxsize=256)
    def read(cls, text: str) -> LoopProgram:
        """The program that a text says."""
        calls, whole, unsplit = pickle.loads(base64.b64decode(text))
        return cls(calls, whole, frozenset(unsplit), text, kind=text)

    @property
    def _beside(self) -> int:
        """How many values come out beside the last block's output."""
        return len(self.calls[-1].hands) - self.calls[-1].is_skipped

    def run(self, index: int, block: Any, value: Any) -> Any:
        """Run one block.

        Args:
            index: Its place.
            block: The block.
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
            args, kwargs, leaves = operation.arguments.of(values, tensors)
            if operation.function is not None:
                values.append(run_function(operation.function, args, kwargs))
                continue
            part = block.get_submodule(operation.part) if operation.part else block
            output = part(*args, **kwargs)
            if not operation.arguments.are_still(args, kwargs, leaves):
                raise RuntimeError(
                    f"Block {index} changes a list or a dictionary that it is given. In the"
                    " pipeline blocks run after the loop, on copies, so the model's own would stay"
                    " as it is. Let the block return what it adds, beside its hidden state, and let"
                    " the loop collect that."
                )
            _check_structure(index, operation, output)
            for expected in operation.expects:
                _check(index, expected, output)
            if operation.own:
                _check_own(index, operation, output, values)
            values.append(output)
        handed = tuple(entry.of(values, tensors) for entry in call.hands)
        if index < len(self.calls) - 1:
            return handed, given, text
        output = values[-1]
        if call.is_skipped:
            output, handed = handed[0], handed[1:]
        made = self.without(output, None)
        return (made, handed) if self._beside else made

    def parted(self, made: Any) -> tuple[Any, tuple[Any, ...]]:
        """The last block's output, and what comes out beside it, of what :meth:`run` returns.

        Raises:
            RuntimeError: If another program has made it, on the last stage.
        """
        if not self._beside:
            is_own, parts = isinstance(made, Tensor) or not self.calls[-1].is_skipped, (made, ())
        else:
            is_own = type(made) is tuple and len(made) == 2 and type(made[1]) is tuple
            is_own, parts = is_own and len(made[1]) == self._beside, made
        if not is_own:
            raise RuntimeError(
                "The loop skips blocks, so that something else comes out of it than before, which"
                f" other stages can't know with step='micro-batch'.{ADD_RESIDUALS}"
            )
        return parts

    def unskipped(self) -> LoopProgram:
        """The same, with blocks that the loop skips called as others are.

        One stays skipped where no other is handed as many values, and hands on as many.
        """
        if not any(call.is_skipped for call in self.calls):
            return self
        handed = [1, *(len(call.hands) for call in self.calls[:-1])]
        called = {
            (n, len(call.hands)): call
            for n, call in zip(handed[:-1], self.calls, strict=False)
            if not call.is_skipped
        }
        *calls, last = (
            called.get((n, len(call.hands)), call) if call.is_skipped else call
            for n, call in zip(handed, self.calls, strict=True)
        )
        if last is not self.calls[-1]:
            last = self.calls[-1] if self._beside else BlockCall(last.operations)
        kind = _written((*calls, last), self.whole, sorted(self.unsplit))
        return replace(self, calls=(*calls, last), kind=kind)

    def without(self, output: Any, instead: Any) -> Any:
        """The last block's output with something instead of what can't be put together."""
        if not self.unsplit:
            return output
        leaves, spec = tree_flatten(output)
        kept = [instead if i in self.unsplit else one for i, one in enumerate(leaves)]
        return tree_unflatten(kept, spec)


def _elements(output: Any, count: int) -> Sequence[Any]:
    """What a block returns, as so many elements at least: the leaves of a tuple and the like."""
    elements = [output] if isinstance(output, Tensor) else tree_leaves(output)
    if len(elements) < count:
        raise RuntimeError(
            f"A block returns {len(elements)} elements, and the model uses number {count}, which"
            " the first block returns: let all blocks return as many."
        )
    return elements


def _check_structure(index: int, operation: Operation, output: Any) -> None:
    """Refuse what a block returns, if the model was told of another structure."""
    spec = "" if isinstance(output, Tensor) else None
    if operation.spec is None or spec == operation.spec:
        return
    found = repr(tree_structure(output)) if spec is None else "a tensor"
    if found != operation.spec:
        expected = _on_a_line(operation.spec or "a tensor")
        raise RuntimeError(
            f"Block {index} returned {_on_a_line(found)}, not {expected} as without data: the"
            " model goes by what blocks return between two of them, before it is known. Let it"
            " depend on the training mode and on arguments alone."
        )


def _on_a_line(text: str) -> str:
    return " ".join(text.split())


def _check(index: int, expected: Expected, output: Any) -> None:
    """Refuse what a block returns, if it is other than the model's loop was told."""
    elements = _elements(output, expected.element + 1)
    made, hidden = elements[expected.element], elements[0]
    samples = len(hidden) if isinstance(hidden, Tensor) and hidden.ndim else 0
    shape = expected.shape and (samples, *expected.shape[1:])
    if shape is None or not _is_tensor(made):
        if shape is None and made is None:
            return
        what = f"{_described(made)}, not {'None' if shape is None else f'a tensor {list(shape)}'},"
    elif made.shape != shape:
        what = f"shape {list(made.shape)}, not {list(shape)}"
    elif expected.dtype is not None and made.dtype != expected.dtype:
        what = f"{made.dtype}, not {expected.dtype}"
    else:
        return
    element = f" (element {expected.element} of what it returns)" if expected.element else ""
    state = "something" if element else "a hidden state"
    raise RuntimeError(
        f"Block {index} returned {state} of {what} as it was expected to{element}, and the model"
        " goes by this between two blocks, before it is known: use it before the first one or after"
        " the last."
    )


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_own(index: int, operation: Operation, output: Any, values: Sequence[Any]) -> None:
    """Refuse a change in place of what a block has returned, where others would change, too."""
    elements = _elements(output, max(operation.own) + 1)
    for i in operation.own:
        others = (*values, *elements[:i], *elements[i + 1 :])
        memory = {v.untyped_storage()._cdata for v in others if _is_tensor(v)}
        if _is_tensor(elements[i]) and elements[i].untyped_storage()._cdata in memory:
            raise RuntimeError(
                f"The model changes in place what block {index} has returned, which shares memory"
                " with what it was given: write x = x + y for x += y, and functions without"
                " inplace=True between blocks."
            )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def of_any_loop(run_layer: RunLayer) -> RunLayer:
    """What runs layers, for several loops: of each the program is run that its values bring."""
    return _run_as_told if is_loop(run_layer) else run_layer


def program_of(run_layer: RunLayer) -> LoopProgram | None:
    """The program of a loop that runs layers; None: something else does."""
    program = getattr(run_layer, "__self__", None)
    return program if isinstance(program, LoopProgram) else None


def is_loop(run_layer: RunLayer) -> bool:
    """Whether what runs layers is the program of a loop."""
    return program_of(run_layer) is not None


def unskipped(run_layer: RunLayer) -> RunLayer:
    """What runs layers, with those that a loop skips; see :meth:`LoopProgram.unskipped`."""
    program = program_of(run_layer)
    return run_layer if program is None else _unskipped(program.text).run


@lru_cache(maxsize=256)
def _unskipped(text: str) -> LoopProgram:
    return LoopProgram.read(text).unskipped()


def kind_of(run_layer: RunLayer, value: Any) -> Any:
    """What stands for a program's text where the blocks that it skips don't matter.

    Args:
        run_layer: What :func:`unskipped` gives.
        value: The text, or something else, which stands for itself.
    """
    program = program_of(run_layer)
    return value if program is None or value != program.text else program.kind


def _run_as_told(index: int, block: Callable[..., Any], value: Any) -> Any:
    return LoopProgram.read(value[2]).run(index, block, value)


def _written(*program: Any) -> str:
    """A program as text, the same for programs that are the same."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # the same whether or not two equal parts are one object
    pickler.dump(program)
    return base64.b64encode(file.getvalue()).decode()
