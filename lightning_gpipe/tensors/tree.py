"""Pytrees: tuples, lists, dicts, named tuples, and the classes that PyTorch's registry knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

# PyTorch's own pytrees: private by name, and what its public APIs and the Hugging Face model
# outputs register with.
from torch.utils._pytree import (
    KeyPath,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from lightning_gpipe.tensors.overlaps import stretch

Leaf: TypeAlias = Any


CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)


@dataclass(frozen=True, slots=True)
class TreeStructure:
    """What stands around the leaves of a tree; compares by value.

    Args:
        spec: The pytree's.
        places: For each leaf of the pytree its number in the tree; None: they are the same leaves.
    """

    spec: TreeSpec
    places: tuple[int, ...] | None


_LEAVES = (Tensor, *CONSTANTS)
_LEAF = TreeStructure(tree_structure(0), None)  # a leaf by itself


@dataclass(slots=True)  # several are made for each action, and frozen ones take longer
class Tree:
    """A flattened pytree.

    Args:
        leaves: Tensors and constants, in the registry's order; a tensor that stands in several
            places once, so that it is one tensor again on another stage.
        spec: The structure around them; compares by value.
        in_common: Leaves that share memory with others without being the same tensor: a change of
            one would change the others, but not of their copies.
    """

    leaves: list[Leaf]
    spec: TreeStructure
    in_common: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any, what: str) -> Tree:
        """Flatten a value.

        Args:
            value: Any pytree whose leaves are tensors or constants (None, numbers, strings, …).
            what: What the value is, for the error.

        Raises:
            TypeError: If a leaf is something else, whose tensors could not be found, or a tensor
                without strides.
        """
        if type(value) is Tensor and value.layout == torch.strided and not value.is_nested:
            return cls([value], _LEAF)
        leaves, spec = tree_flatten(value)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
                kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
                raise TypeError(
                    f"{what} holds a {kind} tensor, which can't be split or sent: give a dense one"
                    " (x.to_dense(), or x.to_padded_tensor(0.0) and lengths), and convert it in a"
                    " layer. In evaluation nn.TransformerEncoder makes nested tensors of a padding"
                    " mask: build it with enable_nested_tensor=False."
                )
            if not isinstance(leaf, _LEAVES):
                raise TypeError(
                    f"{what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which can't"
                    " be split or sent: use tensors, numbers, strings and None in tuples, lists,"
                    " dicts, named tuples or classes registered with PyTorch's pytree registry"
                    " (torch.utils._pytree.register_dataclass)."
                )
        if len(leaves) == 1:
            return cls(leaves, TreeStructure(spec, None))
        single, places = _each_once(leaves)
        return cls(single, TreeStructure(spec, places), _in_common_memory(single))

    @classmethod
    def of_gradients(cls, gradients: Sequence[Tensor | None]) -> Tree:
        """A list of gradients: each in its place, though one tensor may be the gradient of two."""
        return cls(list(gradients), _list_of(len(gradients)))

    def replaced_in(self, container: Any) -> list[KeyPath]:
        """Where lists and dictionaries hold something else now.

        Args:
            container: What :meth:`value` has given.
        """
        parts = container if isinstance(container, tuple) else (container,)
        if not any(isinstance(part, (list, dict)) for part in parts):
            return []
        before = dict(tree_flatten_with_path(self.value())[0])
        now, _ = tree_flatten_with_path(container)
        return [path for path, leaf in now if path not in before or before[path] is not leaf]

    def value(self) -> Any:
        """The pytree again."""
        if self.spec.spec.is_leaf():
            return self.leaves[0]
        places = self.spec.places
        leaves = self.leaves if places is None else [self.leaves[i] for i in places]
        return tree_unflatten(leaves, self.spec.spec)

    def with_leaves(self, leaves: list[Leaf]) -> Tree:
        """The same structure around other leaves."""
        return Tree(leaves, self.spec, self.in_common)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Tree:
        """The same with what a function makes of each tensor."""
        return self.with_leaves([function(t) if isinstance(t, Tensor) else t for t in self.leaves])

    def detached(self) -> Tree:
        """The same values without their graphs."""
        return self.mapped(Tensor.detach)

    def wanting(self) -> list[bool]:
        """For each leaf whether it wants a gradient, where gradients are enabled."""
        trains = torch.is_grad_enabled()
        return [trains and isinstance(t, Tensor) and t.requires_grad for t in self.leaves]

    def versions(self) -> list[int]:
        """Counters that move when the tensors are changed in place."""
        return [*map(version_of, self.tensors())]

    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def version_of(tensor: Tensor) -> int:
    """What moves when a tensor is changed in place; nothing does for one of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def tree_tensors(value: Any) -> list[Tensor]:
    """The tensors in a pytree, in order, each as often as it stands there."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@cache
def _list_of(length: int) -> TreeStructure:
    """The structure of a list of leaves."""
    return TreeStructure(tree_structure([0] * length), None)


def _each_once(leaves: list[Leaf]) -> tuple[list[Leaf], tuple[int, ...] | None]:
    """The leaves, each tensor once, and where they stand; None: no tensor stands twice."""
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    if len(set(tensors)) == len(tensors):
        return leaves, None
    single: list[Leaf] = []
    known: dict[int, int] = {}
    places = []
    for leaf in leaves:
        place = known.get(id(leaf), len(single))
        if place == len(single):
            single.append(leaf)
            if isinstance(leaf, Tensor):
                known[id(leaf)] = place
        places.append(place)
    return single, tuple(places)


def _in_common_memory(leaves: list[Leaf]) -> tuple[int, ...]:
    """The tensors whose stretches of memory overlap; their entries may lie between each other's."""
    tensors = [(i, t) for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.numel()]
    if len(tensors) < 2:
        return ()
    stretches = sorted((*stretch(t), i) for i, t in tensors if _has_memory(t))
    found: set[int] = set()
    reach = (0, -1)  # where the stretch ends that goes furthest so far, and whose it is
    for start, end, i in stretches:
        if start < reach[0]:
            found |= {i, reach[1]}
        reach = max(reach, (end, i))
    return tuple(sorted(found))


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor isn't on the meta device, and doesn't just pass for one that isn't."""
    return not tensor.is_meta and tensor.untyped_storage().device.type != "meta"
