"""docs/compatibility.md is complete, and its check can fail."""

from __future__ import annotations

import pytest

from tests.compatibility import table


def test_the_table_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    is_wrong = table.main()
    screen = capsys.readouterr().out
    assert not is_wrong, screen
    assert "complete, and each with a test" in screen


def test_a_missing_row_is_found() -> None:
    text = table.PATH.read_text()
    lines = text.splitlines()
    for name in ("max_time", "on_train_start", "Timer", "CSVLogger", "AsyncCheckpointIO"):
        without = "\n".join(line for line in lines if not line.startswith(f"| `{name}` "))
        assert any(name in problem for problem in table.problems(table.read(without)))


def test_a_wrong_row_is_found() -> None:
    text = table.PATH.read_text()
    wrong = text.replace("| `LBFGS` | refused |", "| `LBFGS` | works |").replace(
        "| `max_time` | works |", "| `max_time` | refused |"
    )
    assert any("max_time" in problem for problem in table.problems(table.read(wrong)))
    untested = f"{text}\n## Features\n| `something else` | works | |\n"
    assert any("something else" in problem for problem in table.problems(table.read(untested)))
