"""What a stage can do with a micro-batch, and programs of it: plain data.

A *schedule* is one program per stage, a program a sequence of actions. The engine runs the program
of its stage; the validator, the grid printer and the simulator read the same data. This room knows
nothing of tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

Op: TypeAlias = Literal["F", "R", "B"]


Checkpoint: TypeAlias = Literal["always", "except_last", "never"]


CHECKPOINT_MODES: tuple[Checkpoint, ...] = get_args(Checkpoint)


class Action(NamedTuple):
    """One thing a stage does with one micro-batch.

    Args:
        op: ``F`` forward; ``R`` re-materialize, that is run the forward again from the kept input,
            this time keeping its activations; ``B`` backward.
        micro_batch: Index of the micro-batch, from 0.
    """

    op: Op
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.op}{self.micro_batch}"


Program: TypeAlias = tuple[Action, ...]


Schedule: TypeAlias = tuple[Program, ...]


@lru_cache(maxsize=256)
def kept_graphs(program: Program) -> frozenset[int]:
    """The micro-batches whose forward keeps its activations for the backward."""
    recomputed = {m for op, m in program if op == "R"}
    return frozenset(m for op, m in program if op == "B" and m not in recomputed)


def invalid(schedule: Schedule, problem: str) -> ValueError:
    """The error that says what is wrong with a schedule, with all programs."""
    programs = "\n".join(
        f"  stage {k}: {' '.join(map(repr, program))}" for k, program in enumerate(schedule)
    )
    return ValueError(f"Invalid schedule: {problem}.\n{programs}")
