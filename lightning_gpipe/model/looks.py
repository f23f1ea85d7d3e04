"""What blocks return, by shape and type, before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_unflatten

from lightning_gpipe.model.between import Function, Look
from lightning_gpipe.model.on_meta import UntraceableLayer, run_on_meta
from lightning_gpipe.model.promise import Unknown, refusal

_REMEMBERED = 4096
_OFTEN = 2  # inputs after which a block that has kept their shape and type is thought to do so


class Looks:
    """What blocks return for inputs of a shape, seen by running them without data.

    Args:
        as_written: Lets a block be called as if it were in no pipeline.
    """

    def __init__(self, as_written: Callable[..., AbstractContextManager[None]]) -> None:
        self._as_written = as_written
        self._known: dict[Hashable, Tensor | None] = {}
        self._applied: dict[Hashable, tuple[set[int], Tensor, bool]] = {}
        self._kept: Counter[Hashable] = Counter()  # by the block: inputs whose look it has kept
        self._others: set[Hashable] = set()  # blocks that have changed one

    def of(
        self,
        place: Hashable,
        block: nn.Module,
        leaves: Sequence[Any],
        spec: TreeSpec,
        hidden: Tensor,
    ) -> Tensor:
        """What a block returns, or the first of a tuple; as its input where that isn't known.

        Args:
            place: Tells blocks apart.
            block: The block.
            leaves: Its arguments, with tensors on the meta device.
            spec: Their structure.
            hidden: The one of them that is its hidden state.

        Returns:
            A tensor on the meta device.
        """
        if self._kept[place] >= _OFTEN and place not in self._others:
            return hidden
        key = place, tuple(_look(leaf) for leaf in leaves)
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = found = self._run(block, leaves, spec)
            if found is not None and _look(found) == _look(hidden):
                self._kept[place] += 1
            else:
                self._others.add(place)
        found = self._known[key]
        return hidden if found is None else found

    def applied(
        self,
        func: Any,
        function: Function,
        leaves: Sequence[Any],
        hidden: tuple[int, ...],
        spec: TreeSpec,
        samples: int,
    ) -> tuple[set[int], Tensor, bool]:
        """What a function between two blocks returns.

        Args:
            func: As it was called.
            function: What it is.
            leaves: Its arguments, with tensors on the meta device.
            hidden: Which of them are hidden states.
            spec: Their structure.
            samples: N.

        Returns:
            Which of the arguments are tensors that are the same for all samples; a tensor on the
            meta device; and whether it shares the memory of an argument.

        Raises:
            RuntimeError: If it may not stand there.
        """
        key = function, hidden, samples, tuple(_look(leaf) for leaf in leaves), repr(spec)
        if key not in self._applied:
            if len(self._applied) >= _REMEMBERED:
                self._applied.clear()
            found = _applied(func, function, leaves, hidden, spec)
            if not found[1].ndim or found[1].shape[0] != samples:
                raise refusal(func)
            self._applied[key] = found
        return self._applied[key]

    def _run(self, block: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> Tensor | None:
        """Run a block; None: it can't run without data, or returns something else."""
        if any(Unknown in type(leaf).__mro__ for leaf in leaves):
            return None
        args, kwargs = tree_unflatten(list(leaves), spec)
        try:
            with self._as_written(block), torch._C.DisableTorchFunction():
                returned = run_on_meta(block, *args, **kwargs)
        except (UntraceableLayer, TypeError):
            return None
        first = returned[0] if isinstance(returned, tuple) and returned else returned
        return on_meta(first) if isinstance(first, Tensor) else None


def is_tensor(value: object) -> bool:
    """Whether something is a tensor; stand-ins don't tell."""
    return Tensor in type(value).__mro__


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the shape and type of another one."""
    shape, dtype = tensor.shape, tensor.dtype
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return torch.empty(shape, dtype=dtype, device="meta")


def _look(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if is_tensor(leaf) else repr(leaf)


def _applied(
    func: Any, function: Function, leaves: Sequence[Any], hidden: Sequence[int], spec: TreeSpec
) -> tuple[set[int], Tensor, bool]:
    """See :meth:`Looks.applied`."""
    looks = [Look(leaf.ndim) if i in hidden else leaf for i, leaf in enumerate(leaves)]
    whole = function.whole(*tree_unflatten(looks, spec))
    if whole is None:
        raise refusal(func)
    args, kwargs = tree_unflatten(list(leaves), spec)
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            result = function.run(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise refusal(func, f" ({error})") from error
    if not isinstance(result, Tensor):
        raise refusal(func)
    memory = {leaf.untyped_storage()._cdata for leaf in leaves if is_tensor(leaf)}
    is_shared = result.untyped_storage()._cdata in memory
    return {i for i, leaf in enumerate(leaves) if id(leaf) in whole}, result, is_shared
