"""The state of optimizers, of which every stage holds that of its own parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.state.gather import to_first_stage
from lightning_gpipe.state.placement import Placement


def gather_optimizer(
    optimizer: Optimizer, placement: Placement, channel: ObjectChannel
) -> dict[str, Any]:
    """An optimizer's state dict. Collective over the pipeline.

    Returns:
        On the first stage that of an optimizer of the whole module; on others their own part.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if "state" not in state:  # Lightning's stand-in where configure_optimizers returned None
        return state
    parameters = _parameters(optimizer)
    owners = [placement.owner(p) for p in parameters]
    own = {i: s for i, s in state["state"].items() if placement.is_here(parameters[i])}
    for stage in range(1, len(channel.ranks)):
        part = {i: s for i, s in own.items() if owners[i] == stage}
        theirs = to_first_stage(channel, "optimizer state", stage, part)
        if channel.index == 0:
            own.update(theirs)
    state["state"] = dict(sorted(own.items()))
    return state


def own_part(optimizer: Optimizer, placement: Placement, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a whole module's optimizer state dict that this stage holds."""
    if "state" not in state:
        return state
    parameters = _parameters(optimizer)
    own = {i: s for i, s in state["state"].items() if placement.is_here(parameters[int(i)])}
    return {**state, "state": own}


def adopt(optimizers: Iterable[Optimizer], placement: Placement, device: torch.device) -> None:
    """Let optimizers hold the state of this stage's parameters alone, on its device."""
    for optimizer in optimizers:
        for parameter in list(optimizer.state):
            if not placement.is_here(parameter):
                del optimizer.state[parameter]
        state_to(optimizer, device)


def state_to(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimizer's state; step counters only where a fused kernel reads them."""
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                state.update(
                    {
                        key: value.to(device)
                        for key, value in state.items()
                        if isinstance(value, Tensor)
                        and not value.is_meta  # of a parameter that was removed from the module
                        and (key != "step" or on_device)
                    }
                )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
