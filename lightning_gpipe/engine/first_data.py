"""Notices layers that set themselves up by the first data that they see, once for all.

Such as the scales of a normalizing flow (ActNorm), or a codebook that begins with samples. Without
a pipeline they see a mini-batch, here a micro-batch, and what they set stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_TEXT = (
    "Layer {index} ({layer}) of the backbone changes {what} in its forward of the first micro-batch"
    " of a run, and not in the second one's. If it sets itself up by the first data, as ActNorm and"
    " some codebooks do, it has seen a micro-batch in place of the mini-batch, and the whole run"
    " differs from one without a pipeline. Call the module once with a whole mini-batch before"
    " trainer.fit, or use chunks=1."
)


#: The types of what is looked at, and in which its size is computed.
_KINDS = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32),
    **dict.fromkeys(
        (torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64), torch.float64
    ),
}
_State: TypeAlias = dict[str, tuple[int, int]]
_ONE = 0x3FF << 52  # the bits of 1.0


class FirstData:
    """Looks at the first call with gradients, and at the first one without.

    Such a layer changes parameters in the first micro-batch, or sets a flag beside other buffers
    that it changes, and leaves them as they are in the second one.

    Args:
        layers: Those of a stage, by their index in the backbone.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._seen = set[bool]()
        self._changed: dict[int, _State] = {}  # what the first micro-batch has changed
        self._warned = set[int]()

    def watched(self, m: int, micro_batches: int) -> AbstractContextManager[None]:
        """Run a micro-batch's forward inside this context.

        Args:
            m: The micro-batch.
            micro_batches: M.
        """
        if m == 0 and micro_batches > 1 and torch.is_grad_enabled() not in self._seen:
            self._seen.add(torch.is_grad_enabled())
            return self._look()
        if m == 1 and self._changed:
            return self._look_again()
        return nullcontext()

    @contextmanager
    def _look(self) -> Iterator[None]:
        before = {i: _state_of(layer) for i, layer in self._layers.items()}
        yield
        for i, layer in self._layers.items():
            now = _state_of(layer)
            changed = {n: v for n, v in now.items() if n in before[i] and before[i][n] != v}
            if changed:
                self._changed[i] = changed

    @contextmanager
    def _look_again(self) -> Iterator[None]:
        yield
        for i, changed in self._changed.items():
            now = _state_of(self._layers[i])
            found = {n: v for n, v in changed.items() if now.get(n) == v}
            named = dict(self._layers[i].named_parameters(remove_duplicate=False))
            parameters = [name for name in found if name in named]
            flags = [name for name, (size, count) in found.items() if count == 1 and size == _ONE]
            if parameters:
                self._warn(i, f"its parameter '{parameters[0]}'")
            elif flags and len(found) > len(flags):
                self._warn(i, f"its buffer '{flags[0]}', which seems to tell whether it is set up,")
        self._changed = {}

    def _warn(self, index: int, what: str) -> None:
        if index not in self._warned:
            self._warned.add(index)
            layer = type(self._layers[index]).__name__
            warnings.warn(_TEXT.format(index=index, layer=layer, what=what), stacklevel=2)


def _state_of(layer: nn.Module) -> _State:
    """The size of each parameter and buffer, and its number of elements.

    But for batch norm's statistics, and tables whose rows are kept short when they are read.
    """
    found: _State = {}
    for prefix, module in layer.named_modules():
        is_short = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm
        if is_short or isinstance(module, _NormBase):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            kind = _KINDS.get(tensor.dtype) if tensor is not None else None
            if tensor is None or kind is None or type(tensor.detach()) is not Tensor:
                continue
            value = tensor.detach() if tensor.is_floating_point() else tensor.detach().to(kind)
            size = torch.linalg.vector_norm(value, dtype=kind).to(torch.float64)
            bits = int(size.view(torch.int64))  # NaN equals itself
            found[f"{prefix}.{name}".lstrip(".")] = bits, tensor.numel()
    return found
