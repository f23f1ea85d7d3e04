"""Tells of samples that are computed together before the backbone, where steps run by parts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_gpipe.engine.coupling import mixes_samples
from lightning_gpipe.engine.step_graph import Samples, look_of, made_of

_GRAPHS = 64  # that are looked at


@dataclass(slots=True)
class MixedInput:
    """Warns where the backbone's input for a sample is computed from other samples, too.

    It looks at the graph of the input, so it sees what modules and parameters do to the data, not
    what was done to these before.

    Args:
        is_told: Whether nothing is to be looked at, any more.
    """

    is_told: bool
    _graphs: set[int] = field(default_factory=set)

    def look(self, samples: int, data: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Look at a micro-batch's input of the backbone, and warn once.

        Args:
            samples: How many there are.
            data: What the step was given.
            given: What it gives the backbone.
        """
        made = [tensor for tensor in given if tensor.grad_fn is not None]
        if self.is_told or not made or len(self._graphs) == _GRAPHS:
            return
        look = hash(tuple(look_of(tensor.grad_fn) for tensor in made))
        if look in self._graphs:
            return
        self._graphs.add(look)
        come_in = Samples.of(samples, data).come_in
        of_samples = set().union(*(made_of(come_in, tensor.grad_fn) for tensor in made))
        if mixes_samples(made, samples, of_samples):
            self.is_told = True
            warnings.warn(
                "What stands before the backbone computes samples together, as attention does"
                " that takes dimension 0 for time. With step='micro-batch' it sees those of a"
                " micro-batch, so the weights come out otherwise. Compute each sample by itself,"
                " as layers with batch_first=True do, or use GPipeStrategy(step='mini-batch').",
                stacklevel=2,
            )
