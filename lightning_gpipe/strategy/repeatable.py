"""Which functions of a step can run again, with other samples, and do nothing but compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.model.elsewhere import writes
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.model.remote import tensors_in

_STATISTICS = {"batch_norm", "instance_norm"}
#: Functions that draw as many random numbers as it takes, which depends on what they are given.
_REJECTING = {"_sample_dirichlet", "_standard_gamma", "binomial", "poisson"}
_OPERATORS = torch._ops.OpOverload, torch._ops.OpOverloadPacket


@cache
def only_computes(function: Callable[..., Any]) -> bool:
    """Whether a function is PyTorch's, and talks to no other rank."""
    if isinstance(function, _OPERATORS):
        return str(function).startswith("aten.")
    room = getattr(function, "__module__", None) or "torch"
    return room.partition(".")[0] == "torch" and not room.startswith("torch.distributed")


def are_alike(results: Sequence[Any]) -> bool:
    """Whether what was read of tensors is the same in all runs, or isn't a number."""
    if not isinstance(results[0], (bool, int, float, list, tuple)):
        return results[0] is None or isinstance(results[0], str)
    return all(result == results[0] for result in results)


def draw_the_same(runs: Sequence[Ran]) -> bool:
    """Whether a function has drawn as many random numbers for each element in all runs."""
    name, shapes = runs[0].name, [[t.shape for t in run.made] for run in runs]
    if any(each != shapes[0] for each in shapes):
        return False
    given = zip(*(run.given for run in runs), strict=True)
    return name not in _REJECTING or all(torch.equal(t, own[0]) for own in given for t in own)


def moves_statistics(ran: Ran) -> bool:
    """Whether a normalisation moves running statistics."""
    if ran.name not in _STATISTICS:
        return False
    default = ran.args[5] if len(ran.args) > 5 else ran.name == "instance_norm"
    moves = ran.kwargs.get("training", ran.kwargs.get("use_input_stats", default))
    return bool(moves) and (ran.kwargs.get("running_mean", [*ran.args, None][1]) is not None)


def _is_in_place(ran: Ran) -> bool:
    """Whether a function was told to change what it was given."""
    place = _place_of_in_place(ran.function)
    default = len(ran.args) > place >= 0 and ran.args[place]
    return bool(ran.kwargs.get("inplace", default))


@cache
def _place_of_in_place(function: Callable[..., Any]) -> int:
    try:
        return [*inspect.signature(function).parameters].index("inplace")
    except (TypeError, ValueError):
        return -1


def changed_by(ran: Ran) -> list[Tensor]:
    """The tensors that a function changes."""
    changed = tensors_in(ran.kwargs.get("out"))
    if writes(ran.name) or ran.name.endswith(" =") or _is_in_place(ran):
        changed += tensors_in([*ran.args, *ran.kwargs.values()][0])
    return changed
