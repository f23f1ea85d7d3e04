"""What blocks return, by runs without data: one for all blocks that do the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_map_only, tree_unflatten

from lightning_gpipe.model.alike import module_signature
from lightning_gpipe.model.capturing import unrecorded
from lightning_gpipe.model.on_meta import UntraceableLayer, run_as_set, run_on_zeros

#: Lets modules be called as if nothing were redirected.
AsWritten: TypeAlias = Callable[..., AbstractContextManager[None]]

#: Inputs that are remembered: where they differ in every step there is no use for more.
REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class CantRun:
    """Stands for what a block returns that can't run without data.

    Args:
        why: The reason.
    """

    why: str


class DryRuns:
    """Runs blocks without data, and remembers what they have returned.

    Args:
        as_written: Lets a block be called as if it were in no pipeline.
    """

    def __init__(self, as_written: AsWritten) -> None:
        self._as_written = as_written
        self._device = torch.device("cpu")
        self._known: dict[Hashable, Any] = {}

    def follow(self, hidden: Any) -> None:
        """Run blocks where a hidden state is, if they look at values."""
        if is_tensor(hidden) and not hidden.is_meta:
            self._device = hidden.device

    def returned(self, block: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """What a block returns.

        One that looks at values, as an expert at who is sent to it, runs on zeros.

        Args:
            block: The block.
            leaves: Its arguments; those that are tensors may be on the meta device.
            spec: Their structure.

        Returns:
            It with tensors on the meta device, which others get, too; or :class:`CantRun`.
        """
        signature = module_signature(block)
        if signature is None:
            return self._run(block, leaves, spec)
        key = signature, tuple(look_of(leaf) for leaf in leaves), repr(spec)
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self._run(block, leaves, spec)
        return self._known[key]

    def _run(self, block: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        args, kwargs = tree_unflatten(list(leaves), spec)
        with self._as_written(block), unrecorded(), torch._C.DisableTorchFunction():
            try:
                return run_as_set(block, *args, **kwargs)
            except (UntraceableLayer, TypeError) as error:
                why = str(error)
            zeros = partial(run_on_zeros, block, self._device)
            with suppress(UntraceableLayer, TypeError):
                return tree_map_only(Tensor, on_meta, zeros(*args, **kwargs))
        return CantRun(why)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the shape and type of another one."""
    shape, dtype = tensor.shape, tensor.dtype
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        return torch.empty(shape, dtype=dtype, device="meta")


def is_tensor(value: object) -> bool:
    """Whether something is a tensor; stand-ins don't tell."""
    return Tensor in type(value).__mro__


def look_of(leaf: Any) -> Hashable:
    """A tensor's shape and type; of others how they are written."""
    return (leaf.shape, leaf.dtype) if is_tensor(leaf) else repr(leaf)
