"""Tells which layers do the same, so that what one shows on the meta device goes for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.model.program import program_of
from lightning_gpipe.model.run_layer import RunLayer, run_layer
from lightning_gpipe.tensors.tree import CONSTANTS, Tree

_SEQUENCES = (list, tuple)
_MAPPINGS = (dict, OrderedDict)
_SETS = (set, frozenset)
#: In Hugging Face's layers their place in a cache of keys and values, or a factor by it.
_PLACE = "layer_idx"


@dataclass(frozen=True, slots=True)
class Returned:
    """What a layer has returned of its input, for others that do the same.

    Args:
        output: Tensors that look as those that it returned do.
        passed: For each leaf of the output its place in the input, if it was handed through.
    """

    output: Tree
    passed: tuple[int | None, ...]

    @classmethod
    def of(cls, given: Tree, output: Tree, look: Callable[[Tensor], Tensor]) -> Returned:
        """What it has returned.

        Args:
            given: Its input.
            output: What it returned.
            look: Makes a tensor that looks as another one does.
        """
        places = {id(leaf): i for i, leaf in enumerate(given.leaves) if isinstance(leaf, Tensor)}
        return cls(output.mapped(look), tuple(places.get(id(leaf)) for leaf in output.leaves))

    def again(self, given: Tree, look: Callable[[Tensor], Tensor]) -> Tree:
        """What another layer returns of its input.

        Args:
            given: Its input.
            look: Makes the tensors that aren't handed through; see :meth:`of`.
        """
        leaves = [
            given.leaves[place]
            if place is not None
            else (look(leaf) if isinstance(leaf, Tensor) else leaf)
            for leaf, place in zip(self.output.leaves, self.passed, strict=True)
        ]
        return self.output.with_leaves(leaves)


def signature(layer: nn.Module, run: RunLayer, index: int, given: Tree) -> Hashable | None:
    """What a layer does with an input, as far as it doesn't depend on values.

    Layers with the same signature are of the same classes, have tensors of the same look and equal
    attributes: numbers, strings and the like by value, other objects by identity. So it holds while
    the layers live.

    Args:
        layer: The layer, on any device.
        run: Runs it.
        index: Its place.
        given: Its input.

    Returns:
        None: it can't be told.
    """
    program = program_of(run)
    if program is not None:
        is_last = index == len(program.calls) - 1
        call: Any = repr(program.calls[index]), is_last, program.whole
    elif run is run_layer:
        call = None
    else:
        return None
    of_module = module_signature(layer)
    return None if of_module is None else (call, of_module, _of_input(given))


def module_signature(layer: nn.Module) -> Hashable | None:
    """What a layer does, whatever its input; see :func:`signature`."""
    parts = list(layer.modules())
    numbers = {id(part): i for i, part in enumerate(parts)}  # of modules, and of tensors
    try:
        return tuple(_of_part(part, numbers) for part in parts)
    except RecursionError:
        return None


def _of_input(given: Tree) -> Hashable:
    storages: dict[int, int] = {}
    leaves: list[Hashable] = []
    for leaf in given.leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            number = storages.setdefault(id(storage), len(storages))
            place = number, storage.nbytes(), leaf.storage_offset()
            leaves.append((_of_tensor(leaf), leaf.is_leaf, place))
        else:
            leaves.append(_of_value(leaf, {}))
    return repr(given.spec), tuple(leaves)


def _of_part(part: nn.Module, numbers: dict[int, int]) -> Hashable:
    kind = type(part)
    if any(vars(base).get("__slots__") for base in kind.__mro__):  # attributes that vars() hides
        return id(part)
    own = vars(part)
    if _PLACE in own and kind.__module__.startswith("transformers."):
        own = {name: value for name, value in own.items() if name != _PLACE}
    return kind, tuple((name, _of_value(value, numbers)) for name, value in own.items())


def _of_value(value: Any, numbers: dict[int, int]) -> Hashable:
    kind = type(value)
    if isinstance(value, CONSTANTS):
        return kind, value
    if isinstance(value, Tensor):
        return numbers.setdefault(id(value), len(numbers)), _of_tensor(value)
    if kind in _SEQUENCES:
        return kind, tuple(_of_value(entry, numbers) for entry in value)
    if kind in _MAPPINGS:
        items = ((_of_value(key, numbers), _of_value(v, numbers)) for key, v in value.items())
        return kind, tuple(items)
    if kind in _SETS:
        return kind, frozenset(_of_value(entry, numbers) for entry in value)
    return "object", numbers.get(id(value), -1 - id(value))


def _of_tensor(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.requires_grad
