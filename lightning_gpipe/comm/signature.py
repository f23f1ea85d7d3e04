"""Everything about what crosses between two stages but the tensors' values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.tensors import strides
from lightning_gpipe.tensors.tree import Tree, TreeStructure


@dataclass(frozen=True, slots=True)
class TensorType:
    """Everything about a tensor but its values, and its length in bytes on the wire.

    The device's type alone is kept: a tensor arrives on the receiver's device, or in host memory.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, requires_grad: bool) -> TensorType:
        """The type of a tensor, and whether the other end returns a gradient for it."""
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        nbytes = strides.byte_count(shape, stride, dtype)
        return cls(shape, stride, dtype, tensor.device.type, requires_grad, nbytes)

    def matches(self, leaf: Any, requires_grad: bool) -> bool:
        """Whether a leaf has this type."""
        return (
            isinstance(leaf, Tensor)
            and leaf.shape == self.shape
            and leaf.stride() == self.stride
            and leaf.dtype == self.dtype
            and leaf.device.type == self.device_type
            and requires_grad == self.requires_grad
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything about a boundary but its tensors' values.

    Args:
        spec: The structure.
        leaves: For each leaf its :class:`TensorType`, or its value if it is no tensor.
        tensor_types: The types of the leaves that are tensors.
        requires_grad: For each leaf whether it wants a gradient.
        in_common: Leaves that share memory on the sender; see :class:`Tree`.
    """

    spec: TreeStructure
    leaves: tuple[Any, ...]
    tensor_types: tuple[TensorType, ...]
    requires_grad: tuple[bool, ...]
    in_common: tuple[int, ...]

    @classmethod
    def of(cls, tree: Tree, requires_grad: Sequence[bool]) -> Signature:
        """The signature of a boundary.

        Args:
            tree: The boundary.
            requires_grad: For each leaf whether the next stage returns its gradient.
        """
        leaves = tuple(
            TensorType.of(leaf, wants) if isinstance(leaf, Tensor) else leaf
            for leaf, wants in zip(tree.leaves, requires_grad, strict=True)
        )
        types = tuple(leaf for leaf in leaves if isinstance(leaf, TensorType))
        return cls(tree.spec, leaves, types, tuple(requires_grad), tree.in_common)

    def matches(self, tree: Tree, requires_grad: Sequence[bool]) -> bool:
        """Whether a boundary has this signature; ``1`` and ``True`` are not the same."""
        if len(tree.leaves) != len(self.leaves):
            return False
        for kind, leaf, wants in zip(self.leaves, tree.leaves, requires_grad, strict=True):
            if isinstance(kind, TensorType):
                if not kind.matches(leaf, wants):
                    return False
            elif type(kind) is not type(leaf) or kind != leaf:
                return False
        same = tree.spec is self.spec or tree.spec == self.spec
        return same and tree.in_common == self.in_common

    def fill(self, tensors: Iterable[Tensor]) -> Tree:
        """A boundary of this signature around the given tensors."""
        values = iter(tensors)
        return Tree(
            [next(values) if isinstance(leaf, TensorType) else leaf for leaf in self.leaves],
            self.spec,
            self.in_common,
        )
