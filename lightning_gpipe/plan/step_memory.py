"""What a step holds outside the backbone, seen by running it on tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.model.alike import signature
from lightning_gpipe.model.layer_state import state_kept_in_pass
from lightning_gpipe.model.on_meta import (
    Pretended,
    meta_tensors,
    run_layer_on_meta,
    to_meta_leaf,
)
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.plan.backward_memory import differentiate
from lightning_gpipe.tensors.tree import Tree, tree_tensors


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that live outside the backbone, without its input and its output.

    Args:
        first: The most until the step calls the backbone.
        before: When it does.
        behind: The most from there to the loss.
        differentiated: The most in the backward from the loss to the backbone's output, with the
            gradient of the output.
        left: After that, without this gradient.
        last: The most in the backward from the gradient of the backbone's input on, without it.
    """

    first: int
    before: int
    behind: int
    differentiated: int
    left: int
    last: int

    def share(self, part: float) -> StepMemory:
        """The same for a part of the mini-batch.

        Args:
            part: From 0 to 1.
        """
        return StepMemory(*(round(part * nbytes) for nbytes in astuple(self)))


@dataclass(frozen=True, slots=True)
class SeenStep:
    """What was seen of a step that ran without values.

    Args:
        before: The parameters and buffers, by ``id``, that it uses before it calls the backbone.
        behind: Those that it may use behind the call. What is in neither it doesn't use.
        memory: What it holds outside the backbone, a mini-batch of it; None: not known.
    """

    before: frozenset[int]
    behind: frozenset[int]
    memory: StepMemory | None


class StepWatch(TorchDispatchMode):
    """Notes what memory operations take in a step and its backward, and when it is given back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._events: list[tuple[int, int]] = []  # a number for a piece of memory, and its bytes
        self._numbers: dict[int, int] = {}
        self._left_out: set[int] = set()
        self._marks: list[int] = []
        self._gradients: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_tensors((args, kwargs))}
        for tensor in tree_tensors(result):
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta":  # a step computes nothing there, but we do
                continue
            if id(storage) not in given and id(storage) not in self._numbers:
                number, nbytes = len(self._events), storage.nbytes()
                self._numbers[id(storage)] = number
                self._events.append((number, nbytes))
                weakref.finalize(storage, self._end, id(storage), number, nbytes)
        return result

    def enter(self) -> None:
        """Note that the backbone is called."""
        self._mark()

    def leave(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Note that the call is over; returns its output, with a graph.

        Args:
            inputs: What it is given.
            outputs: What it returns, without a graph.
        """
        self.leave_out([*inputs, *outputs])
        self._mark()
        start = torch.zeros((), device=outputs[0].device, requires_grad=True)
        wanting = [t for t in outputs if t.is_floating_point() or t.is_complex()]
        sources = [t for t in inputs if t.requires_grad]
        joined = iter(_Body.apply(self, wanting, start, *sources))
        return [next(joined) if any(t is w for w in wanting) else t for t in outputs]

    def finish(self, loss: Tensor, parameters: Iterable[Tensor]) -> StepMemory:
        """Differentiate the loss that the step returned, and tell what was held.

        Args:
            loss: A scalar.
            parameters: Whose gradients aren't counted.
        """
        self._mark()
        differentiate(loss)
        self._left_out |= self._known(p.grad for p in parameters if p.grad is not None)
        return self._found()

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Note that the backward has come to the backbone's output, with its gradients."""
        self._gradients = self._known(g for g in gradients if g is not None)
        self._mark()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Don't count some tensors' memory."""
        self._left_out |= self._known(tensors)

    def _mark(self) -> None:
        self._marks.append(len(self._events))

    def _known(self, tensors: Iterable[Tensor]) -> set[int]:
        keys = {id(tensor.untyped_storage()) for tensor in tensors}
        return {self._numbers[key] for key in keys if key in self._numbers}

    def _end(self, key: int, number: int, nbytes: int) -> None:
        self._events.append((number, -nbytes))
        if self._numbers.get(key) == number:
            del self._numbers[key]

    def _found(self) -> StepMemory:
        called, resumed, returned, reached = self._marks
        behind = self._course(self._left_out)
        before = self._course(self._left_out | self._gradients)
        return StepMemory(
            max(behind[: called + 1]),
            behind[called],
            max(behind[resumed : returned + 1]),
            max(behind[returned : reached + 1]),
            before[reached],
            max(before[reached:]),
        )

    def _course(self, left_out: set[int]) -> list[int]:
        """Bytes that live after each event."""
        counted = (nbytes * (number not in left_out) for number, nbytes in self._events)
        return list(accumulate(counted, initial=0))


class _Body(torch.autograd.Function):
    """Stands for the backbone in the graph: from its input to its output."""

    @staticmethod
    def forward(
        ctx: Any, watch: StepWatch, outputs: list[Tensor], start: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.watch = watch
        ctx.looks = [(s.shape, s.dtype, s.device) for s in sources]
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.watch.note_gradients(gradients)
        made = [torch.empty(s, dtype=dtype, device=device) for s, dtype, device in ctx.looks]
        ctx.watch.leave_out(made)
        return None, None, None, *made


def output_of(
    layers: Sequence[nn.Module], run_layer: RunLayer, value: Any, place: Pretended
) -> Tree:
    """What layers return, without values; of those that do the same one runs.

    Args:
        layers: The backbone's.
        run_layer: Runs one of them.
        value: The input of the first.
        place: For which device tensors pass.

    Raises:
        UntraceableLayer: If a layer needs the values of its input.
    """
    known, fresh = dict[Hashable, Tree](), partial(to_meta_leaf, place=place)
    with state_kept_in_pass(layers), torch.no_grad():
        for index, layer in enumerate(layers):
            given = Tree.of(value, "A layer's input")
            key = signature(layer, run_layer, index, given)
            if key is None or key not in known:
                own = meta_tensors(layer, place)
                value = run_layer_on_meta(
                    layer, run_layer, index, value, own, training=None, place=place
                )
                output = Tree.of(value, "A layer's output")
                if key is not None:
                    known[key] = output.mapped(fresh)
            else:
                output = known[key]
            value = output.mapped(fresh).value()
    return Tree.of(value, "The backbone's output")
