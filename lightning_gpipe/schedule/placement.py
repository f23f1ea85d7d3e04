"""Which rank runs which stages."""

from __future__ import annotations


def rounds(ranks: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Round after round: stage s stands on rank s modulo ``ranks``.

    Args:
        ranks: K, the ranks of a pipeline.
        virtual_stages: V, the stages of a rank.

    Returns:
        For each of the V x K stages its rank.
    """
    return tuple(range(ranks)) * virtual_stages
