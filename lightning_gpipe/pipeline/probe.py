"""Runs a user's step up to the backbone's call, for a sample of its input, and takes it back."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from torch import nn

from lightning_gpipe.engine.context import ForwardContext
from lightning_gpipe.model.layer_state import generators_of, own_places
from lightning_gpipe.model.on_meta import Attributes
from lightning_gpipe.model.parameters import outside_buffers
from lightning_gpipe.model.places import FEW
from lightning_gpipe.pipeline.batch_before import BatchBefore
from lightning_gpipe.tensors.random_state import kept, preserved

#: Elements of a tensor or an array up to which its values are put back: data sets have more.
_MOST = 1 << 24


class Reached(BaseException):
    """A step that was run for a sample of the backbone's input has reached the backbone."""

    def __init__(self, sample: Any, context: ForwardContext) -> None:
        super().__init__()
        self.sample, self.context = sample, context


def probe(
    step: Callable[[], Any], given: Any, module: nn.Module, body: nn.Module, device: torch.device
) -> Any | Reached:
    """Run a step that ends where it calls the backbone.

    Args:
        step: Raises :class:`Reached` there.
        given: What it is given.
        module: The user's module.
        body: Its backbone.
        device: Where the step computes.

    Returns:
        What the step returns, or what it has reached the backbone with. Then the module and what
        the step was given are as they were before.
    """
    before_step = BatchBefore(given)
    buffers = outside_buffers(module, body)
    before = [buffer.clone() for buffer in buffers]
    attributes = Attributes(module.modules())
    places = [place for place in own_places(module, body) if not place.is_large]
    generators = generators_of(module, body).values()
    put_back = [*(place.keep() for place in places), kept(generators)]
    held = [BatchBefore(place.entries(), _MOST, FEW) for place in places]
    variables = copy_context()
    try:
        with torch.no_grad(), preserved(device):
            returned = variables.run(step)
    except Reached as reached:
        attributes.restore()  # the step will run once more
        for back in put_back:
            back()
        for values in held:
            values.restore()
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        before_step.restore()
        return reached.with_traceback(None)  # whose frames would keep the run
    for variable, value in variables.items():
        if variable.get(None) is not value:
            variable.set(value)
    return returned
