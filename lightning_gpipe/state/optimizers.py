"""The state of optimizers, of which every rank holds that of its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.model.parameters import trained_by
from lightning_gpipe.state.gather import to_first
from lightning_gpipe.state.optimizer_shards import OptimizerShards
from lightning_gpipe.state.placement import Placement
from lightning_gpipe.state.stored import Stored


def gather_optimizer(
    optimizer: Optimizer, placement: Placement, shards: OptimizerShards, groups: Groups
) -> dict[str, Any]:
    """An optimizer's state dict. Collective over all ranks.

    What a replica keeps goes to the first one of its stage, and from there to the first stage.

    Returns:
        On rank 0 that of an optimizer of the whole module; on others their own part.
    """
    state: dict[str, Any] = optimizer.state_dict()
    if "state" not in state:  # Lightning's stand-in where configure_optimizers returned None
        return state
    parameters = trained_by(optimizer)
    own = own_part(optimizer, placement, shards, state)["state"]
    saved = {i: s for i, s in own.items() if (placement.owner(parameters[i]) or 0) == groups.stage}
    for keeper in range(shards.count):
        part = {i: s for i, s in saved.items() if shards.keeper(parameters[i]) == keeper}
        if keeper:
            part = to_first(groups.siblings, "optimizer state", keeper, part)
        for stage in range(groups.stages) if groups.replica == 0 else ():
            theirs = to_first(groups.pipeline, "optimizer state", stage, part) if stage else part
            if groups.is_first:
                own.update(theirs)
    state["state"] = dict(sorted(own.items()))
    return state


def own_part(
    optimizer: Optimizer, placement: Placement, shards: OptimizerShards, state: dict[str, Any]
) -> dict[str, Any]:
    """The part of a whole module's optimizer state dict that this rank holds."""
    if "state" not in state:
        return state
    parameters = trained_by(optimizer)
    here = [i for i in state["state"] if is_kept(parameters[int(i)], placement, shards)]
    return {**state, "state": _only(here, state["state"], parameters)}


def all_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict, read if it is stored."""
    if "state" not in state:
        return state
    return {**state, "state": _only([*state["state"]], state["state"], trained_by(optimizer))}


def _only(indices: Sequence[int], states: Any, parameters: Sequence[Tensor]) -> dict[int, Any]:
    """The states of some parameters; what is read gets the strides of its parameter."""
    if not isinstance(states, Stored):
        return {index: states[index] for index in indices}
    read = states.only(indices)
    for index, entries in read.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            like = parameters[int(index)]
            if isinstance(value, Tensor) and value.shape == like.shape:
                strided = torch.empty_strided(
                    like.shape, like.stride(), dtype=value.dtype, device=value.device
                )
                entries[key] = strided.copy_(value) if value.stride() != like.stride() else value
    return read


def without_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict that says nothing of any parameter."""
    return {**state, "state": {}} if "state" in state else state


def is_kept(parameter: Tensor, placement: Placement, shards: OptimizerShards) -> bool:
    """Whether this rank keeps the optimizer state of a parameter."""
    return placement.is_here(parameter) and shards.keeps(parameter)


def adopt(
    optimizers: Sequence[Optimizer],
    placement: Placement,
    shards: OptimizerShards,
    device: torch.device,
) -> None:
    """Let optimizers hold the state that this rank keeps alone, on its device.

    Collective over the replicas, where they share it out.
    """
    shards.share_out(optimizers, placement)
    for optimizer in optimizers:
        for parameter in list(optimizer.state):
            if not is_kept(parameter, placement, shards):
                del optimizer.state[parameter]
        state_to(optimizer, device)


def order_as_on_first_rank(
    optimizers: Sequence[Optimizer], module: nn.Module, groups: Groups
) -> None:
    """Let each parameter group have the order of rank 0's. Collective over all ranks.

    Checkpoints and replicas tell parameters by their places, and a group that is made of a set has
    another order in every process.

    Args:
        optimizers: Those of the run.
        module: The user's module.
        groups: The ranks.

    Raises:
        ValueError: If a group has other parameters than rank 0's.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    own = [
        [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    first = groups.decide("order of parameters", lambda: own)
    for optimizer, own_groups, first_groups in zip(optimizers, own, first, strict=True):
        if [sorted(group) for group in own_groups] != [sorted(group) for group in first_groups]:
            raise ValueError(
                f"The parameter groups of {type(optimizer).__name__} are other ones on rank"
                f" {groups.ranks[groups.stage]} than on rank 0. Let configure_optimizers make the"
                " same groups in every process: keep names in lists or dicts, whose order is the"
                " same everywhere, as that of sets isn't."
            )
        for group, own_names, order in zip(
            optimizer.param_groups, own_groups, first_groups, strict=True
        ):
            ranked = _ranked(own_names, order)
            for key in ("params", "param_names"):  # the names where the optimizer was given them
                if key in group:
                    group[key] = [group[key][i] for i in ranked]


def _ranked(names: Sequence[str], order: Sequence[str]) -> list[int]:
    """The places of names, in the order in which others have them."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(range(len(names)), key=lambda i: place[names[i]])


def hold(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Let an optimizer hold the states of a state dict, each tensor in its own type.

    ``load_state_dict`` would give most of them the type of the parameter.
    """
    parameters = trained_by(optimizer)
    for index, entries in state.get("state", {}).items():
        optimizer.state[parameters[index]] = entries


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
