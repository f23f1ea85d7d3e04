"""One error ends every process, soon, with the first error on every terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests import failing
from tests.ranks import start_ranks

RANKS = 4
LIMIT_S = 15.0  # from the failure to the end of the last process


def screens(where: str, rank: int, folder: Path) -> tuple[list[str], list[Any], float]:
    """Run until all processes have ended.

    Returns:
        What each rank printed, the exit codes, and the seconds from the first end to the last.
    """
    folder.mkdir()
    processes = start_ranks(failing.run, RANKS, folder, where, rank, RANKS, str(folder / "saved"))
    ends: dict[int, float] = {}
    limit = time.monotonic() + 60 + LIMIT_S
    while len(ends) < RANKS and time.monotonic() < limit:
        for k, process in enumerate(processes):
            if k not in ends and not process.is_alive():
                ends[k] = time.monotonic()
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    texts = [(folder / str(k)).read_text() for k in range(RANKS)]
    assert len(ends) == RANKS, (ends, texts)
    return texts, [p.exitcode for p in processes], max(ends.values()) - min(ends.values())


def check(where: str, rank: int, message: str, folder: Path) -> None:
    texts, codes, seconds = screens(where, rank, folder / f"{where}{rank}")
    assert all(code != 0 for code in codes), (codes, texts)
    assert seconds < LIMIT_S, seconds
    for k, text in enumerate(texts):
        if k != rank or where not in ("kill", "exit"):
            assert f"[rank {k}] Rank {rank} (stage {rank}) failed:" in text, text
            assert message in text, text


@pytest.mark.parametrize("where", [p for p in failing.PLACES if p != "loader"])
def test_an_exception_on_each_stage(where: str, tmp_path: Path) -> None:
    for rank in range(RANKS):
        check(where, rank, f"broken in {where}", tmp_path)


def test_an_exception_of_the_loader(tmp_path: Path) -> None:
    check("loader", 0, "broken in loader", tmp_path)


@pytest.mark.parametrize("where", ["kill", "exit"])
def test_a_process_that_dies(where: str, tmp_path: Path) -> None:
    for rank in range(RANKS):
        check(where, rank, "its process died", tmp_path)


def test_a_collective_call_on_one_rank_alone(tmp_path: Path) -> None:
    """The others are in another collective call, which isn't ours to check."""
    for rank in (0, 3):
        texts, codes, _ = screens("alone", rank, tmp_path / str(rank))
        assert all(code != 0 for code in codes), (codes, texts)
        for text in texts:
            assert "never under `if rank == 0`" in text, text


@pytest.mark.parametrize(
    ("where", "message"), [("term", "SIGTERM was received"), ("interrupt", "KeyboardInterrupt")]
)
def test_a_signal_to_each_stage(where: str, message: str, tmp_path: Path) -> None:
    for rank in range(RANKS):
        check(where, rank, message, tmp_path)
