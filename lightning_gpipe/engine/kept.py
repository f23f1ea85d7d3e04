"""What layers and their hooks keep of a forward in attributes of modules."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.engine.autograd import Behind, LayerForwards
from lightning_gpipe.model.places import CONTAINERS, FEW
from lightning_gpipe.tensors.tree import version_of

_OTHERS = {"_parameters", "_buffers", "_modules"}
_SETTINGS = {bool, int, str, type(None)}


class KeptValues:
    """The tensors and floats that a forward leaves in attributes, also in lists, tuples and dicts.

    Not in those of thousands of entries, such as a vocabulary.

    Args:
        modules: In whose attributes; the backbone's and those around it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = self._now()

    def tensors(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that weren't there when this was made, or were changed in place since.

        Args:
            given: What the forward was given, which isn't its own.
        """
        return self.new(given)[0]

    def new(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The same, and floats that weren't there."""
        memory = {_memory(tensor) for tensor in given}
        found = [value for key, value in self._now().items() if key not in self._before]
        tensors = [value for value in found if isinstance(value, Tensor)]
        floats = [value for value in found if isinstance(value, float)]
        return [tensor for tensor in tensors if _memory(tensor) not in memory], floats

    def _now(self) -> dict[tuple[int, int], Any]:
        with torch._C.DisableTorchFunctionSubclass():
            return {
                (id(value), version_of(value) if isinstance(value, Tensor) else 0): value
                for part in self._modules
                for value in _attributes(part)
            }


class KeptInStep:
    """What a looked-at step has left in attributes of one micro-batch.

    What metrics keep is of all micro-batches.

    Args:
        modules: In whose attributes.
        forwards: When the layers ran in this step, which alone are looked at; None: all of it is.
    """

    def __init__(self, modules: Sequence[nn.Module], forwards: LayerForwards | None) -> None:
        self._modules = [module for module in modules if not _is_metric(module)]
        self._forwards = forwards
        self._counts: Counter[Hashable] = Counter()
        self._is_looked_at = False
        self._memory: set[int] = set()
        self._tensors: list[Tensor] = []  # so that their memory stays theirs
        self._floats: list[float] = []

    def begin_step(self, kind: Hashable, parts: int) -> None:
        """Begin a step.

        Args:
            kind: Tells training from evaluation.
            parts: The number of its micro-batches, times that of the stages that run all of it.
        """
        self._counts[kind] += 1
        self._is_looked_at = parts > 1 and is_due(self._counts[kind])
        self._memory.clear()
        self._tensors.clear()
        self._floats.clear()

    @contextmanager
    def running(self, given: Sequence[Tensor]) -> Iterator[None]:
        """Run the layers, or the step, inside this context.

        Args:
            given: What they are given.
        """
        if not self._is_looked_at:
            yield
            return
        kept = KeptValues(self._modules)
        yield
        tensors, floats = kept.new(given)
        self._tensors += tensors
        self._memory |= {_memory(tensor) for tensor in tensors}
        self._floats += floats

    def has(self, value: Any) -> bool:
        """Whether a value is one of them, shares memory with one, or is differentiated by one."""
        if not self._is_looked_at:
            return False
        if not isinstance(value, Tensor):
            return any(value is kept for kept in self._floats)
        is_kept = bool(self._memory) and _memory(value) in self._memory
        if is_kept or self._forwards is None:
            return is_kept
        return self._forwards.problem(Behind.of([value])) is not None


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torchmetrics.") for base in type(module).__mro__)


def _memory(tensor: Tensor) -> int:
    """What tells whether two tensors share their memory."""
    with torch._C.DisableTorchFunctionSubclass():  # of tensors that another stage holds, too
        is_plain = tensor.layout == torch.strided
        return tensor.untyped_storage()._cdata if is_plain else id(tensor)


def _is_nothing(value: Any) -> bool:
    """Whether it holds nothing, as most attributes: there are no hooks."""
    kind = type(value)
    return kind in _SETTINGS or ((kind is dict or kind is OrderedDict) and not value)


def _attributes(module: nn.Module) -> list[Any]:
    values = [v for k, v in vars(module).items() if k not in _OTHERS and not _is_nothing(v)]
    seen: dict[int, Any] = {}

    def is_left(value: Any) -> bool:
        """Whether it was looked into before, as a dict may contain itself, or would take long."""
        if id(value) in seen or (issubclass(type(value), CONTAINERS) and len(value) > FEW):
            return True
        seen[id(value)] = value
        return False

    # a proxy claims to be of another class, or fails to tell
    leaves = tree_leaves(values, is_left)
    return [leaf for leaf in leaves if issubclass(type(leaf), Tensor) or type(leaf) is float]
