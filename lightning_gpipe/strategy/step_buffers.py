"""Looks for buffers, and frozen parameters, that a step changes once for each micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_gpipe.comm.looks import is_due

#: Buffers by name, each with its version.
_Buffers: TypeAlias = dict[str, tuple[Tensor, int]]

#: The warning, of something that has a kind and a name.
CHANGED = (
    "The step changes the {kind} '{name}'. With step='micro-batch' it does so once for each"
    " micro-batch, and what it uses of it is what the micro-batch before has left. That is the"
    " mini-batch's only where changes add up, as those of a count of samples. Change it in a hook,"
    " such as on_train_batch_end, or use GPipeStrategy(step='mini-batch')."
)


class StepBuffers:
    """Warns, once, of a buffer outside the backbone that training steps change.

    Or of a frozen parameter, such as one of a teacher that follows what is trained.

    Args:
        module: The user's module.
        backbone: The backbone's name.
    """

    def __init__(self, module: nn.Module, backbone: str) -> None:
        self._module, self._backbone = module, backbone
        self._before: _Buffers | None = None
        self._count, self._is_told = 0, False

    def begin(self) -> None:
        """Look before the first step of a mini-batch, if that is due."""
        self._count += 1
        looks = not self._is_told and is_due(self._count)
        self._before = self._buffers() if looks else None

    def end(self) -> None:
        """Look after its last step."""
        before, self._before = self._before, None
        if before is None:
            return
        for name, (buffer, version) in self._buffers().items():
            old, old_version = before.get(name, (buffer, version))
            is_parameter = isinstance(buffer, nn.Parameter)
            # stages put others in the places of parameters that they don't hold
            is_other = buffer is not old and not is_parameter
            if is_other or (buffer is old and version != old_version):
                self._is_told = True
                kind = "frozen parameter" if is_parameter else "buffer"
                warnings.warn(CHANGED.format(kind=kind, name=name), stacklevel=2)
                return

    def _buffers(self) -> _Buffers:
        """All but those that are kept per mini-batch."""
        return {
            f"{place}.{name}" if place else name: (buffer, buffer._version)
            for place, part in self._module.named_modules()
            if not f"{place}.".startswith(f"{self._backbone}.")
            and not isinstance(part, (_NormBase, Metric))
            for name, buffer in _kept_in(part)
        }


def _kept_in(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers and frozen parameters of a module by itself."""
    yield from part.named_buffers(recurse=False)
    for name, parameter in part.named_parameters(recurse=False):
        if not parameter.requires_grad:
            yield name, parameter
