"""Notices layers that set themselves up by the first data that they see, once for all.

Such as the scales of a normalizing flow (ActNorm), or a codebook that begins with samples. Without
a pipeline they see a mini-batch, here a micro-batch, and what they set stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_TEXT = (
    "Layer {index} ({layer}) of the backbone changes {what} in its forward of the first micro-batch"
    " of a run. If it sets itself up by the first data, as ActNorm and some codebooks do, it has"
    " seen a micro-batch in place of the mini-batch, and the whole run differs from one without a"
    " pipeline. Call the module once with a whole mini-batch before trainer.fit, or use chunks=1."
)


_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class _Flag(NamedTuple):
    """A buffer that may tell whether a layer is set up."""

    module: nn.Module
    name: str

    @property
    def value(self) -> float | None:
        """Its value; None: it has another number of elements than one."""
        buffer = self.module._buffers.get(self.name)
        is_one = buffer is not None and buffer.numel() == 1 and not buffer.is_complex()
        return float(buffer.detach()) if buffer is not None and is_one else None

    @property
    def is_set(self) -> bool:
        """Whether it is 1, or True."""
        return self.value == 1


class FirstData:
    """Looks at the first call with gradients, and at the first one without.

    Args:
        layers: Those of a stage, by their index in the backbone.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._seen = set[bool]()
        self._set: dict[int, list[_Flag]] = {}  # those that the first micro-batch has set
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
        if m == 1 and self._set:
            return self._look_again()
        return nullcontext()

    @contextmanager
    def _look(self) -> Iterator[None]:
        parameters = {i: dict(_own_parameters(layer)) for i, layer in self._layers.items()}
        before = {i: _sizes([*named.values()]) for i, named in parameters.items()}
        flags = {i: list(_unset_flags(layer)) for i, layer in self._layers.items()}
        yield
        for i, named in parameters.items():
            pairs = zip(named, before[i], _sizes([*named.values()]), strict=True)
            changed = [
                name for name, was, now in pairs if was != now and (was == was or now == now)
            ]
            if changed:
                self._warn(i, f"its parameter '{changed[0]}'")
        found = {i: [flag for flag in each if flag.is_set] for i, each in flags.items()}
        self._set = {i: each for i, each in found.items() if each}

    @contextmanager
    def _look_again(self) -> Iterator[None]:
        yield
        for i, flags in self._set.items():
            if name := next((flag.name for flag in flags if flag.is_set), None):  # no counter
                self._warn(i, f"its buffer '{name}', which seems to tell whether it is set up,")
        self._set = {}

    def _warn(self, index: int, what: str) -> None:
        if index not in self._warned:
            self._warned.add(index)
            layer = type(self._layers[index]).__name__
            warnings.warn(_TEXT.format(index=index, layer=layer, what=what), stacklevel=2)


def _own_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a layer, but for tables whose rows are kept short when they are read."""
    short = {
        id(module.weight)
        for module in layer.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    }
    for name, parameter in layer.named_parameters():
        is_plain = parameter.dtype in _DTYPES and type(parameter.detach()) is Tensor
        if is_plain and id(parameter) not in short:
            yield name, parameter


def _sizes(tensors: Sequence[Tensor]) -> list[float]:
    """The size of each: another one, if another value stands there."""
    kinds = [torch.promote_types(t.dtype, torch.float32) for t in tensors]
    pairs = zip(tensors, kinds, strict=True)
    return [float(torch.linalg.vector_norm(t.detach(), dtype=kind)) for t, kind in pairs]


def _unset_flags(layer: nn.Module) -> Iterator[_Flag]:
    """Buffers of one element that is 0, or False, but for batch norm's count."""
    for module in layer.modules():
        if not isinstance(module, _NormBase):
            flags = (_Flag(module, name) for name in module._buffers)
            yield from (flag for flag in flags if flag.value == 0)
