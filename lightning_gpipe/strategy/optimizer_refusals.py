"""Optimizers that can't work where a process has a part of the model, refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.plan.optimizer_state import couples_parameters

#: Optimizers whose step depends on all parameters at once, by the names of their classes.
_WHOLE_MODEL_OPTIMIZERS = {
    "LBFGS",
    "SAM",
    "GSAM",
    "Prodigy",
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptAdan",
    "DAdaptLion",
    "DAdaptSGD",
    "ZeroRedundancyOptimizer",
}

_CLOSURE = "call_once"


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that need the whole model.

    Raises:
        ValueError: With what to do instead.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if _needs_whole_model(optimizer):
            raise ValueError(_whole_model(name))
        if any(group.get("max_grad_norm") for group in optimizer.param_groups):
            raise ValueError(
                f"{name}(max_grad_norm=...) clips by the norm of the gradients that it sees, which"
                " are those of one process: give it max_grad_norm=None, and the Trainer"
                " gradient_clip_val=..., which is right over all stages."
            )
        if couples_parameters(optimizer):
            raise ValueError(
                f"In a step of {name} where a parameter goes depends on the gradients of others,"
                " such as by their norm, and a process has those of its stage."
                f" {_whole_model(name)} For a norm use the Trainer's gradient_clip_val, or"
                " trainer.strategy.grad_norm(parameters) before the step."
            )


def refuse_unlike(optimizers: Iterable[Optimizer], channel: ObjectChannel) -> None:
    """Refuse options that the stages have drawn each for itself. Collective over the pipeline.

    Raises:
        ValueError: With the first that differs, and what to do instead.
    """
    groups = [
        (f"{type(optimizer).__name__}'s parameter group {i}", _options(group))
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
    ]
    first, *others = channel.gather("options of optimizers", groups)
    for stage, theirs in enumerate(others, start=1):
        for (name, options), (_, found) in zip(first, theirs, strict=False):
            for key in options.keys() & found.keys():
                if options[key] != found[key]:
                    raise ValueError(
                        f"{name} has {key}={options[key]} on stage 0, and {key}={found[key]} on"
                        f" stage {stage}: every process runs the script, and has drawn or read its"
                        " own. Call L.seed_everything(...) before random choices, or give all"
                        " processes the same by a configuration or an environment variable."
                    )


def _options(group: dict[str, Any]) -> dict[str, str]:
    """The options of a group that are numbers, or texts, or several of these."""
    options = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and not value.is_meta and not value.ndim:
            value = value.item()  # before the first step
        parts = value if isinstance(value, (tuple, list)) else [value]
        is_option = key not in ("params", "param_names")  # whose order is settled later
        if is_option and all(isinstance(part, (int, float, str)) for part in parts):
            options[key] = repr(value)
    return options


def refuse_to_shard(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers whose state replicas can't share out.

    Raises:
        ValueError: With what to do instead.
    """
    for optimizer in optimizers:
        name, remedy = type(optimizer).__name__, "use GPipeStrategy(shard_optimizer_state=False)."
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise ValueError(
                f"{name} doesn't call the constructor of torch.optim.Optimizer, so its steps can't"
                f" be followed by sending the new values: call super().__init__, or {remedy}"
            )
        if callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"{name}.eval() changes the weights by state that other replicas keep: {remedy}"
            )


def _needs_whole_model(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a known kind, by any class that it inherits, or steps as they do.

    LBFGS and its like can't do without a closure; implementations of SAM step in two parts.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if kinds & _WHOLE_MODEL_OPTIMIZERS or hasattr(optimizer, "second_step"):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _whole_model(name: str) -> str:
    return (
        f"{name} needs all parameters of the model in one process, and GPipeStrategy spreads them"
        " over several: use an optimizer that works parameter by parameter, such as SGD or AdamW."
    )


def called_once(closure: Callable[[], Any], optimizer: object) -> Callable[[], Any]:
    """A closure that may be called once in a step of an optimizer.

    What calls it again has moved the weights by a norm or a search over all of them, of which a
    stage has a part: SAM under any name.

    Raises:
        RuntimeError: At the second call, with what to do instead.
    """
    calls = 0

    def call_once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            raise RuntimeError(f"A step of {name} computes gradients twice. {_whole_model(name)}")
        return closure()

    return call_once


@contextmanager
def explained(optimizer: object) -> Iterator[None]:
    """Add to an error of a step that asks for a gradient what a user can't see in it."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
        if "NoneType" in str(error) and _CLOSURE not in names:
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            add_note(
                error,
                f"In a step of {name} parameters that other stages hold have no gradient: let it"
                " skip those whose p.grad is None, as PyTorch's optimizers do.",
            )
        raise
