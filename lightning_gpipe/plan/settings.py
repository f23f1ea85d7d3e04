"""What a user chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_gpipe.plan.cost import Balance
from lightning_gpipe.schedule.actions import CHECKPOINT_MODES, Checkpoint


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
    checkpoint: Checkpoint
    deferred_batch_norm: bool

    def __post_init__(self) -> None:
        _check_count("chunks", self.chunks)
        _check_count("stages", self.stages)
        _check_balance(self.balance)
        check_choice("checkpoint", self.checkpoint, CHECKPOINT_MODES)

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The layers of each stage, if ``balance`` lists them."""
        if isinstance(self.balance, Sequence) and not isinstance(self.balance, str):
            return tuple(self.balance)
        return None

    @property
    def needs_input(self) -> bool:
        """Whether the balance depends on the backbone's input."""
        return self.balance != "params" and self.sizes is None

    def for_loggers(self) -> dict[str, Any]:
        """What was chosen, beside the numbers of stages and micro-batches."""
        return {
            "balance": getattr(self.balance, "__qualname__", self.balance),
            "checkpoint": self.checkpoint,
            "deferred_batch_norm": self.deferred_batch_norm,
        }


def _check_count(name: str, value: object) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} must be 'auto' or a whole number from 1, got {name}={value!r}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an argument is one of a few strings."""
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {name}={value!r}."
        )


def _check_balance(balance: object) -> None:
    if isinstance(balance, str):
        check_choice("balance", balance, ("flops", "params"))
    elif isinstance(balance, Sequence):
        if not balance or any(
            not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in balance
        ):
            raise ValueError(
                f"balance as a list gives every stage at least one layer, got balance={balance!r}."
            )
    elif not callable(balance):
        raise ValueError(
            "balance must be 'flops', 'params', a list of layers per stage or a function, got"
            f" {balance!r}."
        )
