"""Which parameters of a stage are changed in place: by its layers, or between two passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

_WRITTEN_TWICE = (
    "A layer changes its parameter of shape {shape} in its forward, and does so once more when the"
    " forward runs again to re-materialize activations. Keep in a buffer what a forward changes,"
    " change the parameter in on_train_batch_end, or use GPipeStrategy(checkpoint='never')."
)


class ParameterWrites:
    """Notices changes of parameters.

    Args:
        parameters: Those of a stage.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def versions(self) -> list[int]:
        """Counters that move when a parameter is changed in place."""
        return [p._version for p in self._parameters]

    @contextmanager
    def noted(self, written: set[int]) -> Iterator[None]:
        """Run a forward that will run again.

        Args:
            written: Gets the numbers of the parameters that it changes.
        """
        before = self.versions()
        yield
        after = self.versions()
        if after != before:
            written |= {i for i, now in enumerate(after) if now != before[i]}

    @contextmanager
    def refused(self, written: set[int]) -> Iterator[None]:
        """Run a forward again.

        Args:
            written: The parameters that it changed the first time.

        Raises:
            RuntimeError: If it changes their values once more.
        """
        before = {i: self._parameters[i].detach().clone() for i in written}
        yield
        for i, value in before.items():
            now = self._parameters[i].detach()
            rtol = 16 * torch.finfo(now.dtype).eps if now.is_floating_point() else 0.0
            if not torch.allclose(now, value, rtol=rtol, atol=0.0, equal_nan=True):
                raise RuntimeError(_WRITTEN_TWICE.format(shape=tuple(now.shape)))
