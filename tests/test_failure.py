"""One error ends every process, soon, with the first error on every terminal."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe.strategy import launcher
from tests import failing, models
from tests.ranks import start_ranks
from tests.training import train

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


def uneven(stages: int) -> None:
    """Replicas with different numbers of batches: one stops, the other waits for its gradients."""
    warnings.simplefilter("ignore")

    class Uneven(models.Module):
        def train_dataloader(self) -> Any:
            replica = self.trainer.distributed_sampler_kwargs["rank"]
            x = torch.zeros(8 * (3 + replica), models.WIDTH, dtype=torch.float64)
            return DataLoader(TensorDataset(x, x), batch_size=8)

    train(
        Uneven(),
        max_epochs=1,
        devices=2 * stages,
        strategy=failing.Strategy(2, stages=stages),
        use_distributed_sampler=False,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_replicas_with_different_numbers_of_batches(stages: int, tmp_path: Path) -> None:
    processes = start_ranks(uneven, 2 * stages, tmp_path, stages)
    for process in processes:
        process.join(40)
        assert process.exitcode not in (0, None)
    for rank in range(2 * stages):
        screen = (tmp_path / str(rank)).read_text()
        assert "All ranks have been waiting for each other" in screen, screen


def without_a_terminal(folder: Path) -> None:
    """What is printed can't be: the reader of the screen is gone, as after `| head`."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)
    failing.run("kill", 1, 2, str(folder))


def test_a_broken_terminal(tmp_path: Path) -> None:
    for process in start_ranks(without_a_terminal, 2, tmp_path, tmp_path):
        process.join(40)
        assert process.exitcode not in (0, None)


def by_the_launcher(
    where: str, rank: int, start: str = "popen", ranks: int = RANKS
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.failing", "--rank", str(rank), "--where", where]
    return subprocess.Popen(
        [*command, "--start", start, "--ranks", str(ranks)],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",
        },
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_of(screen: str) -> dict[int, int]:
    """The process of each rank, from what they print at the start."""
    found = re.findall(r"process (\d+) is local rank (\d)", screen)
    return {int(rank): int(process) for process, rank in found}


def start_training(process: subprocess.Popen[str]) -> str:
    """Read the screen until training has started."""
    screen = ""
    for line in process.stdout or ():
        screen += line
        if "Expected bubble" in line:
            time.sleep(1)
            break
    return screen


@pytest.mark.parametrize(
    ("signals", "to", "message"),
    [
        (signal.SIGKILL, 0, "Rank 0 (stage 0) failed: its process died"),
        (signal.SIGKILL, 1, "Rank 1 (stage 1) failed: its process died"),
        (signal.SIGTERM, 0, "SIGTERM was received"),
        (signal.SIGTERM, 1, "Rank 1 (stage 1) failed: SIGTERMException: SIGTERM was received"),
        (signal.SIGINT, None, "KeyboardInterrupt"),
    ],
)
def test_signals_from_outside(signals: signal.Signals, to: int | None, message: str) -> None:
    """As a user or a scheduler sends them to a run that Lightning's launcher started."""
    process = by_the_launcher("step", -1, ranks=2)
    try:
        screen = start_training(process)
        ranks = processes_of(screen)
        assert sorted(ranks) == [0, 1], screen
        start = time.monotonic()
        if to is None:
            os.killpg(process.pid, signals)  # what Ctrl-C does
        else:
            os.kill(ranks[to], signals)
        screen += process.communicate(timeout=60)[0]
        while any(is_alive(p) for p in ranks.values()) and time.monotonic() < start + LIMIT_S:
            time.sleep(0.1)
        assert time.monotonic() - start < LIMIT_S, screen
        assert not [p for p in ranks.values() if is_alive(p)], "no process is left"
        assert process.returncode != 0
        assert message in screen, screen
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_an_error_in_a_forked_process() -> None:
    """Lightning handles errors in the process that waits for the others, not in these."""
    process = by_the_launcher("callback", 1, "fork")
    screen = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    for rank in range(RANKS):
        assert f"[rank {rank}] Rank 1 (stage 1) failed: Broken: broken in callback" in screen


def test_a_forked_process_that_dies() -> None:
    """The launcher sends SIGTERM to the others at once, which isn't why the run ended."""
    process = by_the_launcher("kill", 2, "fork")
    screen = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    for rank in (0, 1, 3):
        assert f"[rank {rank}] Rank 2 (stage 2) failed: its process died" in screen


def test_a_failed_child_is_not_seen_at_once() -> None:
    """Lightning kills all processes as soon as it sees one, before they can tell why."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        child = launcher.PatientlySeen(process, patience_s=1.0)
        process.wait()
        assert (child.poll(), child.returncode) == (None, None)
        time.sleep(1.1)
        assert (child.poll(), child.returncode) == (3, 3)
        assert child.pid == process.pid


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":  # many runs in a row, each of which fails at random
    torch.set_num_threads(1)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbelow(10**6)
    draw = random.Random(seed)
    for number in range(int(sys.argv[1])):
        place = draw.choice([*failing.PLACES, *failing.SIGNALS, "exit"])
        where = 0 if place == "loader" else draw.randrange(RANKS)
        with tempfile.TemporaryDirectory() as folder:
            _, codes, seconds = screens(place, where, Path(folder) / "run")
        assert all(code != 0 for code in codes)
        assert seconds < LIMIT_S
        print(f"{number + 1}: {place} on rank {where}: exit codes {codes} within {seconds:.1f} s")
    print(f"seed {seed}: {sys.argv[1]} runs, no hang")
