"""What a stage can do with a micro-batch, and programs of it: plain data.

A rank runs one or more *stages*. Its *program* is a sequence of actions; a *schedule* is the
programs of all ranks, with the placement of the stages on them. The executor runs the program of
its rank; the validator and the simulator read the same data. This room knows
nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

Op: TypeAlias = Literal["F", "R", "B", "I", "W"]


class Action(NamedTuple):
    """One thing that a stage does with one micro-batch.

    Args:
        stage: Index of the stage, from 0.
        op: ``F`` forward; ``R`` re-materialize, that is run the forward again from the kept input,
            this time keeping its activations; ``B`` backward. A backward may be split: ``I``
            computes the gradient of the input, for which the stage before waits, and ``W``, at any
            time after it, those of the weights.
        micro_batch: Index of the micro-batch, from 0.
    """

    stage: int
    op: Op
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.op}{self.micro_batch}"


Program: TypeAlias = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank does.

    Args:
        programs: The program of each rank.
        placement: For each stage the rank that runs it. Stages in order may stand on any ranks.
        chained: Micro-batches whose forwards run through all stages while every rank waits: none
            goes on behind its own ones before the last stage's ended.
    """

    programs: tuple[Program, ...]
    placement: tuple[int, ...]
    chained: frozenset[int] = frozenset()

    def last_of(self, forward: Action) -> Action:
        """The last stage's forward of the same micro-batch."""
        return forward._replace(stage=len(self.placement) - 1)

    def invalid(self, problem: str) -> ValueError:
        """The error that says what is wrong, with all programs."""
        programs = "\n".join(
            f"  rank {rank}: {' '.join(map(repr, program))}"
            for rank, program in enumerate(self.programs)
        )
        return ValueError(f"Invalid schedule: {problem}.\n{programs}")


def kept_graphs(program: Program) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs whose forward keeps its activations for the backward."""
    recomputed = {(stage, m) for stage, op, m in program if op == "R"}
    backward = {(stage, m) for stage, op, m in program if op in ("B", "I")}
    return frozenset(backward - recomputed)


@lru_cache(maxsize=1 << 16)  # a search asks for the same in every schedule that it tries
def upstream_of(action: Action) -> tuple[Action, ...]:
    """The actions of a neighbouring stage of which one makes what an action needs, if any does."""
    stage, op, m = action
    if op == "F":
        return (Action(stage - 1, "F", m),)
    return (Action(stage + 1, "B", m), Action(stage + 1, "I", m)) if op in ("B", "I") else ()
