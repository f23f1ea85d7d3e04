"""One forward, one backward: as soon as a backward can run, it does."""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest

from lightning_gpipe.schedule.actions import Action, Schedule
from lightning_gpipe.schedule.checkpoint import Checkpoint, recomputed
from lightning_gpipe.schedule.gpipe import backward
from lightning_gpipe.schedule.simulate import is_complete


@lru_cache(maxsize=256)
def one_f_one_b(placement: tuple[int, ...], micro_batches: int, checkpoint: Checkpoint) -> Schedule:
    """1F1B, with one stage a rank; interleaved 1F1B with several, in rounds.

    A rank runs the forwards that fill the pipeline, then a forward and a backward in turn, then
    the backwards that are left. So no more than K micro-batches' activations are held at once,
    rather than M (PipeDream-flush, Narayanan et al. 2021; interleaved: Megatron-LM, Narayanan et
    al. 2021, section 2.2). Where the backward follows its forward at once nothing is recomputed::

        rank 0 | 0F0 0F1 0F2 0R0     0B0 0R1     0B1 0R2 0B2
        rank 1 |     1F0 1F1 1R0 1B0 1F2 1R1 1B1     1R2 1B2
        rank 2 |         2F0 2B0 2F1 2B1 2F2 2B2

    Args:
        placement: For each stage its rank; the stages of a rank in rounds.
        micro_batches: M.
        checkpoint: Of which micro-batches activations are re-materialized; the last ones are.
    """
    ranks = max(placement) + 1
    rounds = len(placement) // ranks
    again = frozenset(range(micro_batches)[micro_batches - recomputed(checkpoint, micro_batches) :])
    for more in range(micro_batches * rounds + 1):  # a last, smaller group may need more forwards
        fills = [
            (rounds - 1) * ranks + (1 if rounds == 1 else 2) * (ranks - 1 - rank) + more
            for rank in range(ranks)
        ]
        programs = [
            _program(rank, ranks, rounds, micro_batches, fill, again)
            for rank, fill in enumerate(fills)
        ]
        schedule = Schedule(tuple(map(tuple, programs)), placement)
        if is_complete(schedule):
            break
    return schedule


def _program(
    rank: int, ranks: int, rounds: int, micro_batches: int, fill: int, again: frozenset[int]
) -> list[Action]:
    """A rank's program, with so many forwards before the first backward."""
    stages = range(rank, ranks * rounds, ranks)
    groups = [
        range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)
    ]
    forwards = [Action(s, "F", m) for group in groups for s in stages for m in group]
    backwards = [(s, m) for group in groups for s in reversed(stages) for m in group]
    program = forwards[:fill]
    for f, pair in zip_longest(forwards[fill:], backwards):
        program += [f] if f is not None else []
        if pair is not None:
            follows = program[-1:] == [Action(pair[0], "F", pair[1])]
            program += backward(pair[0], pair[1], pair[1] in again and not follows)
    return program
