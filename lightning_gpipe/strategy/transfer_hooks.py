"""Calls the hooks through which a batch goes to a device, before there is a Trainer that does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gpipe.failure.reason import line_of

_TRANSFER = "transfer_batch_to_device"
_HOOKS = ("on_before_batch_transfer", _TRANSFER, "on_after_batch_transfer")


class HookFailed(ValueError):
    """A hook can't run without values, or without a Trainer that runs."""


def transferred(module: pl.LightningModule, batch: Any, device: torch.device) -> Any:
    """What a step gets of a batch.

    Lightning calls a hook of the data module if that overrides it, or else the module's.

    Args:
        module: The module; if it has a Trainer with a data module, hooks of that run, too.
        batch: What the data loader gives, without values.
        device: On which the step runs.

    Raises:
        HookFailed: If a hook fails, with its name and what to do.
    """
    data = getattr(module._trainer, "datamodule", None)
    holders = {
        name: data if data is not None and is_overridden(name, data) else module for name in _HOOKS
    }
    if not any(is_overridden(name, holder) for name, holder in holders.items()):
        return batch
    batch = move_data_to_device(batch, torch.device("cpu"))
    if device.type != "cpu":  # as a run gives it
        device = torch.device(device.type, device.index or 0)
    for name, holder in holders.items():
        arguments = (batch, device, 0) if name == _TRANSFER else (batch, 0)
        try:
            batch = getattr(holder, name)(*arguments)
        except Exception as error:
            raise HookFailed(
                f"{name}() of {type(holder).__name__} can't run without values, or without a"
                f" Trainer that runs ({line_of(error)}). Let it compute with tensors alone, and not"
                " read what is in them; or give no batch, but the module an example_input_array,"
                " which goes through no hook."
            ) from error
    return batch
