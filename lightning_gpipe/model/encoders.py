"""PyTorch's Transformer encoder with a padding mask.

In evaluation it makes a nested tensor of what its mask leaves. That can't be split into
micro-batches, nor sent, and isn't made where a function mode follows the step. So here its layers
get the mask, and what stands where the mask pads is set to zero afterwards, as a nested tensor
becomes dense again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_DEVICES = {"cpu", "cuda", "xpu", torch.utils.backend_registration._privateuse1_backend_name}


def encoders_of(
    module: nn.Module, backbone: nn.Module, is_followed: bool
) -> Iterator[nn.TransformerEncoder]:
    """The Transformer encoders with PyTorch's forward that can't make nested tensors.

    Args:
        module: The user's module.
        backbone: What is cut into stages.
        is_followed: Whether a function mode follows what is outside of it.
    """
    inside = set(backbone.modules())
    for part in module.modules():
        if (
            isinstance(part, nn.TransformerEncoder)
            and (part.layers is backbone or (is_followed and part not in inside))
            and type(part).forward is nn.TransformerEncoder.forward
            and "forward" not in part.__dict__
        ):
            yield part


def encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """What the encoder's forward does, without nested tensors.

    Args:
        encoder: The encoder.
        src: As its forward takes it: [N, S, E], where there may be nested tensors.
        mask: The same.
        src_key_padding_mask: The same: [N, S].
        is_causal: The same.

    Returns:
        [N, S, E].
    """
    dense = copy.copy(encoder)  # the module stays as it is: it may be cut during the call
    dense.use_nested_tensor = False
    given = src, mask, src_key_padding_mask, is_causal
    if src_key_padding_mask is None or mask is not None or not _may_nest(encoder, src):
        return nn.TransformerEncoder.forward(dense, *given)
    dense._modules = {**encoder._modules, "norm": None}
    encoded = nn.TransformerEncoder.forward(dense, *given)
    pads = src_key_padding_mask
    pads = pads if pads.dtype is torch.bool else pads != 0
    is_kept = pads.logical_not()  # only a batch that is padded at the end becomes nested
    pads = pads & (is_kept.long().cummin(1).values.bool() == is_kept).all()
    encoded = encoded.masked_fill(pads.unsqueeze(-1), 0.0)
    return encoded if encoder.norm is None else encoder.norm(encoded)


def _may_nest(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether PyTorch's forward makes a nested tensor of a padded batch."""
    first: Any = encoder.layers[0]
    tensors = [src, *first.parameters()]
    return (
        encoder.use_nested_tensor
        and torch.backends.mha.get_fastpath_enabled()
        and not first.training
        and src.dim() == 3
        and not src.is_nested
        and src.device.type in _DEVICES
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )
