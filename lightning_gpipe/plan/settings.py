"""What a user chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, cast, get_args

from lightning_gpipe.plan.cost import Balance
from lightning_gpipe.schedule.checkpoint import CHECKPOINT_MODES, Checkpoint

StepMode: TypeAlias = Literal["mini-batch", "micro-batch"]
ScheduleName: TypeAlias = Literal["auto", "fill_drain", "1f1b", "interleaved", "searched"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of :class:`lightning_gpipe.GPipeStrategy` that shape the pipeline, checked.

    Raises:
        ValueError: Naming the argument, what it may be and what it is.
    """

    chunks: int | Literal["auto"]
    stages: int | Literal["auto"]
    backbone: str | None
    balance: Balance
    checkpoint: Checkpoint | Literal["auto"]
    deferred_batch_norm: bool
    virtual_stages: int = 1
    step: StepMode = "mini-batch"
    schedule: ScheduleName = "auto"
    save_distributed_checkpoint: bool = False
    shard_optimizer_state: bool = False
    memory_limit: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("chunks", "stages"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        if not is_count(self.virtual_stages):
            raise ValueError(
                "virtual_stages must be a whole number from 1, got"
                f" virtual_stages={self.virtual_stages!r}."
            )
        object.__setattr__(self, "virtual_stages", int(self.virtual_stages))
        if not (self.backbone is None or (isinstance(self.backbone, str) and self.backbone)):
            raise ValueError(
                "backbone must be None or the dotted name of a submodule, such as 'model.layers',"
                f" got {_shown(self.backbone)}."
            )
        for name in ("deferred_batch_norm", "save_distributed_checkpoint", "shard_optimizer_state"):
            check_flag(name, getattr(self, name))
        check_choice("step", self.step, get_args(StepMode))
        check_choice("schedule", self.schedule, get_args(ScheduleName))
        if self.step == "mini-batch" and self.schedule not in ("auto", "fill_drain"):
            raise ValueError(
                f"schedule={self.schedule!r} begins backwards before the last forward, and with"
                " step='mini-batch' the loss needs all outputs: give step='micro-batch', too."
            )
        _check_balance(self.balance)
        object.__setattr__(self, "memory_limit", memory_size("memory_limit", self.memory_limit))
        object.__setattr__(self, "checkpoint", _checkpoint(self.checkpoint))

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The layers of each virtual stage, if ``balance`` lists them."""
        if isinstance(self.balance, Sequence) and not isinstance(self.balance, str):
            return tuple(map(int, self.balance))
        return None

    @property
    def limit(self) -> int | None:
        """``memory_limit`` in bytes."""
        return cast("int | None", self.memory_limit)

    @property
    def recomputes(self) -> bool:
        """Whether any activations are re-materialized."""
        return self.recomputing not in ("never", 0)

    @property
    def reads_ahead(self) -> bool:
        """Whether the first stage may begin a mini-batch while others are in the one before.

        It then holds the batch twice, which counts where little else is held.
        """
        return self.step == "micro-batch" and not self.recomputes

    @property
    def recomputing(self) -> Checkpoint:
        """What is re-materialized; all, as long as ``"auto"`` isn't decided."""
        return "always" if self.checkpoint == "auto" else self.checkpoint

    @property
    def needs_input(self) -> bool:
        """Whether the cut, or what is re-materialized, depends on the backbone's input."""
        by_layers = self.balance != "params" and self.sizes is None
        return by_layers or self.memory_limit is not None or self.checkpoint == "auto"

    def without_input(self) -> Settings:
        """The same, with what doesn't depend on the backbone's input."""
        balance = self.balance if self.sizes is not None else "params"
        return replace(self, balance=balance, memory_limit=None, checkpoint=self.recomputing)

    def for_loggers(self) -> dict[str, Any]:
        """What was chosen, beside the numbers of stages and micro-batches."""
        return {
            "balance": getattr(self.balance, "__qualname__", self.balance),
            "checkpoint": self.checkpoint,
            "deferred_batch_norm": self.deferred_batch_norm,
            "virtual_stages": self.virtual_stages,
            "step": self.step,
            "schedule": self.schedule,
            "shard_optimizer_state": self.shard_optimizer_state,
            "memory_limit": self.memory_limit,
        }


def _count(name: str, value: object) -> int | str:
    """A number as Python's; NumPy's are whole numbers, too."""
    if isinstance(value, str) and value == "auto":
        return value
    if not is_count(value):
        raise ValueError(f"{name} must be 'auto' or a whole number from 1, got {name}={value!r}.")
    return int(cast(Integral, value))


def is_count(value: object) -> bool:
    """Whether a value is a whole number from 1, Python's or NumPy's."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _checkpoint(value: object) -> Checkpoint | Literal["auto"]:
    """A mode, a number of micro-batches, or a share of them from 0.0 to 1.0."""
    if isinstance(value, str) and value in ("auto", *CHECKPOINT_MODES):
        return cast(Checkpoint, value)
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral) and 0 <= float(value) <= 1:
        return float(value)
    raise ValueError(
        f"checkpoint must be one of {', '.join(map(repr, CHECKPOINT_MODES))}, 'auto', a whole"
        " number of micro-batches from 0, or a share of them from 0.0 to 1.0, got"
        f" checkpoint={value!r}."
    )


def memory_size(name: str, value: object) -> int | None:
    """The bytes that an argument says as a number, or as a text such as "16GB" or "15.5 GiB"."""
    if value is None:
        return None
    if is_count(value):
        return int(cast(Integral, value))
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])(i?)b\s*", str(value), re.IGNORECASE)
    if isinstance(value, str) and found is not None:
        number, letter, binary = found.groups()
        thousand, power = 1024 if binary else 1000, 1 + "KMGT".index(letter.upper())
        nbytes = int(float(number) * thousand**power)
        if nbytes:
            return nbytes
    if isinstance(value, str):
        raise ValueError(
            f"{name} as a text must be a number above 0 with its unit, kB, MB, GB, TB, kiB, MiB,"
            f" GiB or TiB, such as '16GB' or '15.5GiB', got {name}={value!r}."
        )
    raise ValueError(
        f"{name} must be None, a whole number of bytes from 1, or a text with its unit such as"
        f" '16GB' or '15.5GiB', got {name}={value!r}."
    )


def check_flag(name: str, value: object) -> None:
    """Check that an argument is True or False, and no text, which counts as true."""
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, got {name}={value!r}.")


def _shown(value: object) -> str:
    """A value, or its type where that is all that is worth a line."""
    return repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an argument is one of a few strings."""
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {name}={value!r}."
        )


def _check_balance(balance: object) -> None:
    if isinstance(balance, str):
        check_choice("balance", balance, ("flops", "params", "memory", "time"))
    elif isinstance(balance, Sequence):
        if not balance or not all(map(is_count, balance)):
            raise ValueError(
                f"balance as a list gives every stage at least one layer, got balance={balance!r}."
            )
    elif not callable(balance):
        raise ValueError(
            "balance must be 'flops', 'params', 'memory', 'time', a list of layers per stage or a"
            " function,"
            f" got {balance!r}."
        )
