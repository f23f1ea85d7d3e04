"""Pytrees: tuples, lists, dicts, named tuples, and the classes that PyTorch's registry knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

# PyTorch's own pytrees: private by name, and what its public APIs and the Hugging Face model
# outputs register with.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

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
class Tree:
    """A flattened pytree.

    Args:
        leaves: Tensors and constants, in the registry's order.
        spec: The structure around them; compares by value.
    """

    leaves: list[Leaf]
    spec: TreeSpec

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
        leaves, spec = tree_flatten(value)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
                kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
                raise TypeError(
                    f"{what} holds a {kind} tensor, which can't be split or sent: give a dense one"
                    " (x.to_dense(), or x.to_padded_tensor(0.0) and lengths), and convert it in a"
                    " layer."
                )
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise TypeError(
                    f"{what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which can't"
                    " be split or sent: use tensors, numbers, strings and None in tuples, lists,"
                    " dicts, named tuples or classes registered with PyTorch's pytree registry"
                    " (torch.utils._pytree.register_dataclass)."
                )
        return cls(leaves, spec)

    def value(self) -> Any:
        """The pytree again."""
        return tree_unflatten(self.leaves, self.spec)

    def with_leaves(self, leaves: list[Leaf]) -> Tree:
        """The same structure around other leaves."""
        return Tree(leaves, self.spec)

    def detached(self) -> Tree:
        """The same values without their graphs."""
        return self.with_leaves([t.detach() if isinstance(t, Tensor) else t for t in self.leaves])

    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
