"""How often ranks check what takes time."""

from __future__ import annotations

from lightning_gpipe.comm.looks import is_due


def test_checks_become_rare_and_meet_every_period() -> None:
    due = [number for number in range(1, 11_000) if is_due(number)]
    assert due[:9] == [1, 2, 3, 5, 8, 13, 21, 34, 55]
    assert len(due) == 20
    assert all(any(number % period == 0 for number in due) for period in range(1, 13))
