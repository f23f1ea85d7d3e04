"""Building a module where its layers will be held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gpipe.model.lazy import LazyModule
from lightning_gpipe.model.on_meta import Attributes
from lightning_gpipe.tensors.random_state import RandomState


@contextmanager
def lazily(
    module: pl.LightningModule,
    init_context: Callable[[], AbstractContextManager[object]],
    device: torch.device,
) -> Iterator[None]:
    """Run the module's ``configure_model`` inside, on the meta device.

    Where it needs values on its way, it runs once more, on the host.

    Args:
        module: The user's module.
        init_context: What the precision wants to be built in.
        device: Where tensors go that are neither parameters nor buffers.
    """
    before = Attributes(module.modules())
    random, hook = RandomState.current(device), module._current_fx_name or "configure_model"
    try:
        with LazyModule.of(module).recording(module, device):
            yield
    except Exception as error:
        before.restore()
        random.restore(device)
        with init_context():
            getattr(module, hook)()
        rank_zero_warn(
            f"{hook}() can't run on the meta device, where tensors have no values"
            f" ({type(error).__name__}: {error}). It ran in host memory instead, so each process"
            " has built the whole model, where its own layers would do."
        )
