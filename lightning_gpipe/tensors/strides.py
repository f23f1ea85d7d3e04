"""A tensor as bytes and back, with its strides.

Whether a tensor is channels-last or transposed decides which kernel runs on it, and so the last
bits of its result. A stage must therefore get its input with the strides it would have if the layer
before stood on the same device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor in the order of its memory.

    Args:
        tensor: Any strided tensor. Expanded dimensions (stride 0) are taken once.

    Returns:
        A contiguous ``uint8`` tensor of shape ``[bytes]`` on the same device; no copy where the
        tensor is dense.
    """
    compact = tensor.detach().resolve_conj().resolve_neg()
    if not compact.is_contiguous():
        compact = _compact(compact)
    compact = compact.contiguous()
    return compact.as_strided((compact.numel(),), (1,)).view(torch.uint8)


def from_bytes(
    data: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The inverse of :func:`to_bytes`; shares the memory of ``data`` where the layout is dense.

    Args:
        data: ``uint8`` tensor of shape ``[bytes]``.
        shape: The tensor's shape.
        stride: The tensor's strides. They come back exactly, except for a tensor that overlaps
            itself in memory.
        dtype: The tensor's type.
    """
    if is_dense(shape, stride):  # no view, so that its own views can be changed in place
        made = torch.empty(0, dtype=dtype, device=data.device)
        place = data.storage_offset() // dtype.itemsize
        return made.set_(data.untyped_storage(), place, shape, stride)
    elements = data.view(dtype)
    order = _memory_order(shape, stride)
    sizes = _distinct_sizes(shape, stride)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    values = elements.view([sizes[d] for d in order]).permute(inverse)
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, stride, strict=True))
    if span < values.numel():
        return values.contiguous()
    spread = elements.new_empty(span).as_strided(sizes, stride).copy_(values)
    return spread.expand(shape)


def byte_count(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """Length of what :func:`to_bytes` makes of a tensor, in bytes."""
    count = dtype.itemsize
    for n in _distinct_sizes(shape, stride):
        count *= n
    return count


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else: not sparse, nested or quantized."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)


def empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Memory on a device for a tensor of the same shape, strides and type."""
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)


def copy(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, with the same strides."""
    copied = tensor.clone()
    if copied.stride() == tensor.stride():
        return copied
    return from_bytes(to_bytes(tensor).clone(), tensor.shape, tensor.stride(), tensor.dtype)


def copy_once(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy without a graph; of a tensor that stands in several places one.

    Args:
        tensor: The tensor.
        copies: Those that were made, by the ``id`` of what they are of; gets this one.
    """
    if id(tensor) not in copies:
        copies[id(tensor)] = copy(tensor.detach())
    return copies[id(tensor)]


def _compact(tensor: Tensor) -> Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(_memory_order(tensor.shape, tensor.stride()))


def _memory_order(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    return sorted(range(len(shape)), key=lambda dim: -stride[dim])


def _distinct_sizes(shape: torch.Size, stride: tuple[int, ...]) -> list[int]:
    return [1 if s == 0 and n > 1 else n for n, s in zip(shape, stride, strict=True)]


def is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their span of memory without gap or overlap."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in sorted(
        zip(_distinct_sizes(shape, stride), stride, strict=True), key=lambda pair: pair[1]
    ):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
