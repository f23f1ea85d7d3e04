"""The command ``lightning-gpipe plan``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_gpipe.plan.settings import StepMode
from lightning_gpipe.schedule.checkpoint import Checkpoint
from lightning_gpipe.strategy.gpipe import GPipeStrategy


def plan(
    factory: str,
    devices: int,
    memory: str | None,
    step: StepMode,
    backbone: str | None,
    stages: Sequence[int] | None,
    chunks: Sequence[int] | None,
    virtual_stages: Sequence[int] | None,
    checkpoint: Sequence[Checkpoint] | None,
    device: str | None,
    flops: float | None,
) -> None:
    """Print which layouts of a pipeline fit, and the best of them stage by stage.

    Args:
        factory: What makes the module, as ``package.module:function``. It returns the module, or
            the module and a batch; without a batch the module's ``example_input_array`` is taken.
        devices: Their number.
        memory: Of a device, as ``"16GB"``.
        step: What the steps are given.
        backbone: Dotted name of the backbone.
        stages: Compared numbers of stages.
        chunks: Of micro-batches.
        virtual_stages: Of virtual stages.
        checkpoint: What is re-materialized.
        device: Whose kernels layers will run.
        flops: Operations that a device does in a second.

    Raises:
        SystemExit: With code 1, if nothing fits.
        ValueError: If nothing can be planned.
    """
    module, batch = _made(factory)
    plans = GPipeStrategy(backbone=backbone, step=step).plan(
        module,
        batch,
        devices=devices,
        memory=memory,
        stages=stages,
        chunks=chunks,
        virtual_stages=virtual_stages,
        checkpoint=checkpoint,
        device=device,
        flops=flops,
    )
    print(f"{plans}\n\n{plans.all[0]}")
    if plans.best is None:
        sys.exit(1)


def _made(factory: str) -> tuple[pl.LightningModule, Any]:
    """The module and the batch that a function of the user's makes; None: no batch."""
    name, _, attribute = factory.partition(":")
    if not (name and attribute):
        raise ValueError(
            f"{factory!r} names no function: give one as package.module:function, which returns"
            " a LightningModule, or a LightningModule and a batch."
        )
    if os.getcwd() not in sys.path:  # as `python -m` finds modules
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(name)
        for key in attribute.split("."):
            make = getattr(make, key)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{factory!r} can't be imported: {error}.") from error
    made = make()
    module, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, pl.LightningModule):
        raise ValueError(
            f"{factory!r} returned a {type(made).__name__}: it must return a LightningModule of"
            " `lightning`, or a LightningModule and a batch."
        )
    return module, batch
