"""What a tensor was computed from, told while layers run on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_gpipe.model.elsewhere import writes
from lightning_gpipe.model.on_meta import to_meta_leaf
from lightning_gpipe.tensors.tree import tree_tensors

#: Methods that take from a tensor its type and device, and others that take its shape as well.
_OF_TYPE = {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
_OF_SHAPE = {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}


class Origins(TorchFunctionMode):
    """Follows operations from their inputs to what they return.

    Args:
        batch: The tensors that are split into micro-batches.
        others: Other tensors of the backbone's input.
    """

    def __init__(self, batch: Iterable[Tensor], others: Iterable[Tensor] = ()) -> None:
        super().__init__()
        #: Whether an operation got what comes of the batch, and what comes of the others.
        self.met = False
        self._of_batch = {id(t) for t in batch}
        self._of_others = {id(t) for t in others}
        self._recipes: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no other tensor gets the id of one of them

    def is_of_batch(self, tensor: Tensor) -> bool:
        """Whether a tensor's values depend on the batch's."""
        return id(tensor) in self._of_batch

    def another_of_batch(self, tensor: Tensor) -> Tensor:
        """A tensor that looks as another one does, taken for one that depends on the batch."""
        made: Tensor = to_meta_leaf(tensor)
        self._alive.append(made)
        self._of_batch.add(id(made))
        return made

    def recipe(self, tensor: Tensor) -> int:
        """Stands for the operations that made a tensor, and the numbers that they were given."""
        return self._recipes.get(id(tensor), 0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        heirs = tree_tensors(result)
        name = getattr(func, "__name__", "")
        shapes = [tuple(given[0].shape)] if name in _OF_SHAPE else []
        if writes(name):
            heirs += given[:1]  # an assignment to a part of it returns nothing
        elif name in _OF_TYPE | _OF_SHAPE:
            del given[0]
        of_batch = any(id(t) in self._of_batch for t in given)
        of_others = any(id(t) in self._of_others for t in given)
        self.met |= of_batch and of_others
        numbers = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        recipe = hash((name, *map(self.recipe, given), *numbers, *shapes))
        self._alive.extend(heirs)
        for number, tensor in enumerate(heirs):
            self._recipes[id(tensor)] = hash((recipe, number))
        if of_batch:
            self._of_batch.update(map(id, heirs))
        if of_others:
            self._of_others.update(map(id, heirs))
        return result
