"""A tensor comes back with its values and its strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gpipe.tensors import strides

BASE = torch.arange(240.0).view(2, 3, 4, 10)
CASES = {
    "contiguous": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "transposed": BASE[0, 0].T,
    "permuted": BASE.permute(2, 0, 3, 1),
    "gaps": BASE[..., :7],
    "steps": BASE[:, ::2, :, ::3],
    "gaps, transposed": BASE[..., :7].transpose(1, 3),
    "expanded": BASE[:, :1].expand(-1, 5, -1, -1),
    "expanded scalar": torch.tensor(3.0).expand(4, 2),
    "scalar": torch.tensor(3.0),
    "empty": BASE[:0],
    "no columns": BASE[..., :0],
    "one sample of channels last": BASE.contiguous(memory_format=torch.channels_last)[:1],
    "bool": BASE > 7,
    "int64": BASE.long(),
    "bfloat16": BASE.bfloat16(),
    "complex": torch.complex(BASE, -BASE),
    "conjugate": torch.complex(BASE, -BASE).conj(),
    "offset": BASE.view(-1)[3:],
}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str) -> None:
    tensor = CASES[case]
    data = strides.to_bytes(tensor)
    assert data.dtype == torch.uint8
    assert data.is_contiguous()
    assert data.numel() == strides.byte_count(tensor.shape, tensor.stride(), tensor.dtype)
    back = strides.from_bytes(data.clone(), tensor.shape, tensor.stride(), tensor.dtype)
    check(back, tensor)
    copied = strides.copy(tensor)
    check(copied, tensor)
    if tensor.numel():
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_overlapping_tensors_keep_their_values() -> None:
    tensor = torch.arange(10.0).unfold(0, 4, 1)
    data = strides.to_bytes(tensor)
    back = strides.from_bytes(data, tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(back, tensor)


def test_dense_tensors_are_not_copied() -> None:
    tensor = CASES["channels last"]
    assert strides.to_bytes(tensor).data_ptr() == tensor.data_ptr()


def check(back: Tensor, tensor: Tensor) -> None:
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride() or not tensor.numel()
