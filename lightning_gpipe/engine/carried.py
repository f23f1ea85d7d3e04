"""Notices states of samples that layers carry from one micro-batch to the next.

Such as the memory of a recurrent layer, of the batch before. Without a pipeline the next call is
the next mini-batch's, here it is the next micro-batch's, whose samples are others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.model.backbone import is_compiled
from lightning_gpipe.model.places import FEW
from lightning_gpipe.model.remote import is_metadata
from lightning_gpipe.tensors.tree import tree_tensors

_TEXT = (
    "Layer {index} ({layer}) of the backbone keeps '{name}', with a row for each sample of a"
    " micro-batch, and computes with it in the next one, whose samples are others. So what it"
    " remembers of earlier batches, such as a recurrent state, is that of other samples: use"
    " chunks=1, or give the state to the backbone, and let that return the new one."
)


class Tracked(Tensor):
    """A state of an earlier micro-batch, which tells whether it is computed with."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not is_metadata(func):
                for tensor in tree_tensors((args, kwargs)):
                    if type(tensor) is Tracked:
                        tensor.__dict__["_is_read"] = True
            return func(*args, **kwargs)


class _Kept(NamedTuple):
    layer: int
    module: nn.Module
    name: str  # of the attribute
    value: Any
    tensors: tuple[tuple[Tensor, int], ...]  # in it, with their versions


class CarriedStates:
    """Looks at the second micro-batch of the first call with gradients.

    Args:
        layers: Those of a stage, by their index in the backbone.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        compiled = [i for i, layer in layers.items() if any(map(is_compiled, layer.modules()))]
        self._layers = {i: layer for i, layer in layers.items() if i not in compiled}

    def watched(self, m: int, sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Run a micro-batch's forward inside this context.

        Args:
            m: The micro-batch.
            sizes: Samples in each.
        """
        if m != 1 or not self._layers or not torch.is_grad_enabled():
            return nullcontext()
        return self._look(sizes[0])

    @contextmanager
    def _look(self, samples: int) -> Iterator[None]:
        kept = [
            _Kept(index, module, name, value, found)
            for index, layer in self._layers.items()
            for module in layer.modules()
            for name, value in vars(module).items()
            if (found := _states_in(value, samples))
        ]
        self._layers = {}
        try:
            for state in kept:
                for tensor, _ in state.tensors:
                    tensor.__class__ = Tracked
            yield
        finally:
            for state in kept:
                for tensor, _ in state.tensors:
                    tensor.__class__ = Tensor
            flags = [[_was_read(tensor) for tensor, _ in state.tensors] for state in kept]
        read = [state for state, are_read in zip(kept, flags, strict=True) if any(are_read)]
        for layer, module, name, value, tensors in read:
            is_moved = any(tensor._version != version for tensor, version in tensors)
            if is_moved or vars(module).get(name) is not value:
                text = _TEXT.format(index=layer, layer=type(module).__name__, name=name)
                warnings.warn(text, stacklevel=2)
                break


def _states_in(value: Any, samples: int) -> tuple[tuple[Tensor, int], ...]:
    """The tensors in an attribute that have a row for each sample, with their versions."""
    is_container = type(value) in (tuple, list) and len(value) <= FEW
    parts = value if is_container else (value,)
    return tuple(
        (part, part._version)
        for part in parts
        if type(part) is Tensor and not part.is_inference() and samples in part.shape[:2]
    )


def _was_read(tensor: Tensor) -> bool:
    return bool(tensor.__dict__.pop("_is_read", False))
