"""Training needs nothing of a backend that NCCL doesn't promise."""

from __future__ import annotations

import pytest

from tests.ranks import RankError, run_ranks
from tests.strict.scenarios import HARD, RECOMPUTE, SCENARIOS, fail, run


@pytest.mark.parametrize(
    ("name", "mode", "recompute"),
    [(name, HARD[i % 3], RECOMPUTE[(i + i // 3) % 3]) for i, name in enumerate(SCENARIOS)],
)
def test_the_strict_backend_gives_the_same_weights_and_sees_no_mistake(
    name: str, mode: str, recompute: str
) -> None:
    """One combination each; ``python -m tests.strict`` runs all."""
    for wrong, counts in run(name, mode, (recompute,)):
        assert wrong == []
        assert counts.get("all_reduce") or counts.get("send"), "the backend was not used"


@pytest.mark.parametrize("mode", ["device:first", "pair:block"])
def test_a_failure_of_one_stage_ends_all_at_once(mode: str) -> None:
    with pytest.raises(RankError, match=r"planted.*violations: \[\]"):
        run_ranks(fail, 2, mode, timeout_s=60)
