"""What lives in the backward of a layer, seen by running it on tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import backward  # itself, where a run of one stage has put another in its place
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.model.on_meta import Pretended, UntraceableLayer, run_layer_on_meta
from lightning_gpipe.model.run_layer import RunLayer
from lightning_gpipe.tensors.graph import nodes_of
from lightning_gpipe.tensors.tree import Tree, tree_tensors


def in_backward(
    layer: nn.Module,
    run_layer: RunLayer,
    index: int,
    value: Any,
    own: Mapping[str, Tensor],
    training: bool | None,
    place: Pretended,
) -> tuple[int, int] | None:
    """The most bytes that live in a layer's backward, less those that its forward had saved.

    Args:
        layer: The layer.
        run_layer: Runs it.
        index: Its place.
        value: Its input, without values.
        own: What stands for its parameters and buffers.
        training: See :func:`run_layer_on_meta`.
        place: For which device tensors pass.

    Returns:
        With the gradient of its output as long as an operation needs it, and without; None if its
        backward can't run without values.
    """
    live = _Live()

    def run(index: int, layer: Callable[..., Any], value: Any) -> Any:
        with torch.enable_grad(), live:
            outputs = run_layer(index, layer, _entered(value))
            wanted = [t for t in Tree.of(outputs, "A layer's output").tensors() if t.requires_grad]
            if wanted:
                gradients = [torch.empty_like(t, device=t.device) for t in wanted]
                live.set_apart(gradients)
                end = _End.apply(gradients, *wanted)
                del outputs, wanted
                trained = (p for p in own.values() if p.requires_grad)
                handles = [p.register_post_accumulate_grad_hook(_forget) for p in trained]
                live.begin()
                differentiate(end)
                for handle in handles:
                    handle.remove()
        return value

    try:
        run_layer_on_meta(layer, run, index, value, own, training=training, place=place)
    except UntraceableLayer:
        return None
    return live.most, live.own


def differentiate(end: Tensor) -> None:
    """Run a backward of tensors without values; others in its graph get no gradients.

    A layer may use a weight of another module, without registering it.

    Args:
        end: A scalar.
    """
    found = (getattr(node, "variable", None) for node in nodes_of([end.grad_fn]))
    leaves = [t for t in found if t is not None and (t.is_meta or isinstance(t, FakeTensor))]
    if leaves:
        with torch._C.DisableTorchFunction():  # which would call the other one that a run has put
            backward(end, inputs=leaves)


class _Live(TorchDispatchMode):
    """Counts the bytes of the memory that operations make in a context, and that still lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._known: set[int] = set()
        self._now = self._apart = 0
        self.most = self.own = 0

    def set_apart(self, tensors: list[Tensor]) -> None:
        """Count the memory of some tensors by itself."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._now -= storage.nbytes()
            self._apart += storage.nbytes()
            weakref.finalize(storage, self._end_apart, storage.nbytes())

    def begin(self) -> None:
        """Count from what lives now, apart from what was set apart."""
        self._now, self.own, self.most = 0, 0, self._apart

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_tensors((args, kwargs))}
        for tensor in tree_tensors(result):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in given and key not in self._known:
                self._known.add(key)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._end, key, storage.nbytes())
        self.own = max(self.own, self._now)
        self.most = max(self.most, self._now + self._apart)
        return result

    def _end(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes

    def _end_apart(self, nbytes: int) -> None:
        self._apart -= nbytes
        self._now += nbytes  # it is taken off there, too


class _Start(torch.autograd.Function):
    """Begins a graph with tensors that may be changed in place."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        return None, None


class _End(torch.autograd.Function):
    """Ends a graph: its backward gives some gradients, and lets go of them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def _forget(parameter: Tensor) -> None:
    parameter.grad = None  # it is counted by itself


def _entered(value: Any) -> Any:
    """A layer's input, with a graph of its own."""
    tree = Tree.of(value, "A layer's input")
    leaves = list(tree.leaves)
    wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if wanted:
        start = leaves[wanted[0]].new_empty(0).requires_grad_()
        heads = _Start.apply(start, [leaves[i].detach() for i in wanted])
        for i, head in zip(wanted, heads, strict=True):
            leaves[i] = head
    return tree.with_leaves(leaves).value()
