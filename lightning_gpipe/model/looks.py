"""What blocks and functions between them return, by shape and type, before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# As PyTorch's documentation imports it: no public name leads to it.
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from lightning_gpipe.model.between import Function
from lightning_gpipe.model.dry_runs import REMEMBERED, CantRun, DryRuns, is_tensor, look_of, on_meta
from lightning_gpipe.model.promise import Unknown, refusal
from lightning_gpipe.model.sample_wise import Look

_OFTEN = 2  # inputs after which a block that has kept their shape and type is thought to do so


class Kind(Enum):
    """What a block returns beside its hidden state."""

    TENSOR = "a tensor with a row for each sample, or without dimensions"
    NOTHING = "None"
    OTHER = "something else, or that isn't known"


class Looks:
    """What blocks return for inputs of a shape, seen by running them without data.

    Args:
        dry_runs: Runs them so.
    """

    def __init__(self, dry_runs: DryRuns) -> None:
        self._dry_runs = dry_runs
        self._known: dict[Hashable, tuple[Any, ...] | None] = {}
        self._applied: dict[Hashable, tuple[set[int], Tensor, bool]] = {}
        self._kept: Counter[Hashable] = Counter()  # by the block: inputs whose look it has kept
        self._others: set[Hashable] = set()  # blocks that have changed one
        self._kinds: dict[Hashable, tuple[tuple[Kind, ...], int]] = {}  # and for how many inputs

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
        found, is_new = self._returned(place, block, leaves, spec)
        made = found[0] if found else None
        if is_new and made is not None and look_of(made) == look_of(hidden):
            self._kept[place] += 1
        elif is_new:
            self._others.add(place)
        return made if isinstance(made, Tensor) else hidden

    def beside(
        self,
        place: Hashable,
        block: nn.Module,
        leaves: Sequence[Any],
        spec: TreeSpec,
        element: int,
    ) -> Tensor | None:
        """What a block returns beside its hidden state; see :meth:`of`.

        Args:
            place: Tells blocks apart.
            block: The block.
            leaves: Its arguments, with tensors on the meta device.
            spec: Their structure.
            element: Its place in what it returns.

        Returns:
            A tensor on the meta device; None: it isn't one, or that isn't known.
        """
        found, _ = self._returned(place, block, leaves, spec)
        made = found[element] if found and len(found) > element else None
        return made if isinstance(made, Tensor) else None

    def kinds(
        self,
        place: Hashable,
        block: nn.Module,
        arguments: Callable[[], tuple[Sequence[Any], TreeSpec]],
        samples: int,
        count: int,
    ) -> tuple[Kind, ...]:
        """What a block returns beside its hidden state, of so many elements.

        Args:
            place: Tells blocks apart.
            block: The block.
            arguments: Gives its arguments, with tensors on the meta device, and their structure.
            samples: N.
            count: How many.
        """
        mode = place, block.training
        kinds, times = self._kinds.get(mode, ((), 0))
        if times >= _OFTEN:
            return kinds
        found, is_new = self._returned(place, block, *arguments())
        elements = (*(found or (False,))[1:], *[False] * count)
        now = tuple(_kind(one, samples) for one in elements[:count])
        if is_new or now != kinds:
            self._kinds[mode] = now, times + 1 if now == kinds else 1
        return now

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
        key = function, hidden, samples, tuple(look_of(leaf) for leaf in leaves), repr(spec)
        if key not in self._applied:
            if len(self._applied) >= REMEMBERED:
                self._applied.clear()
            found = _applied(func, function, leaves, hidden, spec)
            if bool(found[1].ndim) != bool(leaves[hidden[0]].ndim) or not is_alike(
                found[1], samples
            ):
                raise refusal(func)
            self._applied[key] = found
        return self._applied[key]

    def _returned(
        self, place: Hashable, block: nn.Module, leaves: Sequence[Any], spec: TreeSpec
    ) -> tuple[tuple[Any, ...] | None, bool]:
        """What a block returns, and whether it was run for that: for inputs of a new shape."""
        key = place, block.training, tuple(look_of(leaf) for leaf in leaves)
        is_new = key not in self._known
        if is_new:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self._run(block, leaves, spec)
        return self._known[key], is_new

    def _run(
        self, block: nn.Module, leaves: Sequence[Any], spec: TreeSpec
    ) -> tuple[Any, ...] | None:
        """Run a block; None: it can't run without data, or it isn't known what it is given."""
        if any(Unknown in type(leaf).__mro__ for leaf in leaves):
            return None
        returned = self._dry_runs.returned(block, leaves, spec)
        if isinstance(returned, CantRun):
            return None
        elements = tree_leaves(returned)
        return tuple(on_meta(one) if isinstance(one, Tensor) else one is None for one in elements)


def is_alike(tensor: Tensor, samples: int) -> bool:
    """Whether a tensor has a row for each sample, or no dimensions."""
    return not tensor.ndim or tensor.shape[0] == samples


def _kind(element: Any, samples: int) -> Kind:
    """The kind of what a block returns: a tensor, or whether it is None."""
    if isinstance(element, Tensor):
        return Kind.TENSOR if is_alike(element, samples) else Kind.OTHER
    return Kind.NOTHING if element else Kind.OTHER


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
    is_shared = function.may_share or result.untyped_storage()._cdata in memory
    return {i for i, leaf in enumerate(leaves) if id(leaf) in whole}, result, is_shared
