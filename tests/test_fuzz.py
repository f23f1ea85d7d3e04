"""The short version of :mod:`tests.fuzz`."""

from __future__ import annotations

from tests.fuzz import fuzz


def test_random_configurations() -> None:
    assert fuzz(12, seed=1) == []
