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
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe.failure.reason import Failure
from lightning_gpipe.failure.screen import LastWord
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.pipeline.module import PipelinedModule
from lightning_gpipe.strategy import children
from tests import failing, models
from tests.ranks import RankError, run_ranks, start_ranks
from tests.scripts import Script
from tests.training import train, trainer

RANKS = 3  # a first, a middle and a last stage
LIMIT_S = 30.0  # from the failure to the last end, groups that block included (see Deadlines)
SILENT = ("kill", "segfault", "exit")  # what ends a process before it can say anything
#: What is told of a failure, where it isn't "broken in" its place.
MESSAGES = {
    **dict.fromkeys(SILENT, "its process died"),
    "term": "SIGTERM was received",
    "interrupt": "KeyboardInterrupt",
    "sysexit": "SystemExit: 0",
    "unreadable": "Unreadable: (its message can't be read: ValueError)",
    "huge": "Broken: \\x1b[2Jbroken in huge xxx",
    "thread": "broken in another thread",
}
CASES = [
    *((where, rank) for where in (*failing.PLACES, "kill", "exit") for rank in range(RANKS)),
    *((where, rank) for where in ("term", "interrupt") for rank in range(RANKS)),
    *((where, 1) for where in (*failing.BEFORE, *failing.AFTER, "segfault")),
    *((where, 1) for where in ("sysexit", "unreadable", "huge", "thread")),
    *((where, 0) for where in (*failing.FIRST, *failing.AFTER)),
]


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


@pytest.mark.parametrize(("where", "rank"), CASES)
def test_one_error_ends_all_ranks_with_the_first_error_told(
    where: str, rank: int, tmp_path: Path
) -> None:
    texts, codes, seconds = screens(where, rank, tmp_path / "run")
    assert all(code != 0 for code in codes), (codes, texts)
    assert seconds < LIMIT_S, seconds
    for k, text in enumerate(texts):
        if k != rank or where not in SILENT:
            told = [line for line in text.splitlines() if line.startswith(f"[rank {k}] Rank")]
            assert len(told) == 1, text  # once
            assert told[0].startswith(f"[rank {k}] Rank {rank} (stage {rank}) failed:"), text
            assert MESSAGES.get(where, f"broken in {where}") in told[0], text
            assert len(told[0]) < 400, text  # in one line
            assert "\x1b[2J" not in told[0]


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_collective_call_on_one_rank_alone(rank: int, tmp_path: Path) -> None:
    """The others are in another collective call, which isn't ours to check."""
    texts, codes, _ = screens("alone", rank, tmp_path / "run")
    assert all(code != 0 for code in codes), (codes, texts)
    for text in texts:
        assert "never under `if rank == 0`" in text, text


@pytest.mark.parametrize("name", ["interrupt", "term"])
def test_a_signal_saves_after_the_step_where_a_callback_saves_on_exceptions(
    name: str, tmp_path: Path
) -> None:
    """One rank alone got the signal, in the middle of a step: all save together, then end."""
    texts, codes, _ = screens(f"{name} to save", 1, tmp_path / "run")
    assert all(code != 0 for code in codes), (codes, texts)
    saved = torch.load(tmp_path / "run" / "saved" / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == failing.STEP + 1, "the step was finished"
    assert len(saved["state_dict"]) == 16, "every stage's layers are there"
    for text in texts:
        assert f"failed: {MESSAGES[name].removesuffix(' was received')}" in text, text
        assert "is not saved" not in text, text
        assert "state_dict() has the values" not in text, text


@pytest.mark.parametrize("name", ["interrupt", "term"])
def test_a_second_signal_ends_at_once(name: str, tmp_path: Path) -> None:
    texts, codes, _ = screens(f"{name} to save twice", 1, tmp_path / "run")
    assert all(code != 0 for code in codes), (codes, texts)
    kind = MESSAGES[name].removesuffix(" was received")
    assert all(f"Rank 1 (stage 1) failed: {kind}" in text for text in texts), texts
    assert not (tmp_path / "run" / "saved" / "on_exception.ckpt").exists()


def sigterm(folder: Path) -> None:
    class Told(L.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            print(f"received_sigterm={trainer.received_sigterm}", flush=True)

    failing.run("term", 1, 2, str(folder), more=[Told()])


def test_the_trainer_tells_that_sigterm_was_received(tmp_path: Path) -> None:
    for process in start_ranks(sigterm, 2, tmp_path, tmp_path):
        process.join(60)
        assert process.exitcode not in (0, None)
    assert "received_sigterm=True" in (tmp_path / "1").read_text()


def sigterm_early(folder: Path) -> None:
    failing.run("term early", 1, 2, str(folder))


def test_sigterm_while_data_is_prepared_ends_all(tmp_path: Path) -> None:
    """Lightning's handler would wait there for the other ranks, which wait for this one."""
    for process in start_ranks(sigterm_early, 2, tmp_path, tmp_path):
        process.join(60)
        assert process.exitcode not in (0, None)
    for rank in range(2):
        assert "SIGTERM was received" in (tmp_path / str(rank)).read_text()


def test_a_parent_that_is_gone_already_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert children._parent_of(str(process.pid)) == process.pid
    assert children._parent_of(str(os.getppid())) == os.getppid()
    assert children._parent_of(str(os.getpid())) is None  # of a process that this one started
    assert children._parent_of("") is None


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
    where: str, rank: int, start: str = "popen", ranks: int = 2
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.failing", "--rank", str(rank), "--where", where]
    return Script(
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


def screen_of(process: subprocess.Popen[str]) -> str:
    """What a run prints that ends by itself, with an error."""
    try:
        screen = process.communicate(timeout=100)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0, screen
    return screen


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
    process = by_the_launcher("none", -1)
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


@pytest.mark.parametrize(
    ("where", "note"),
    [("layer", ". In layer 4 (Layer) of the backbone, micro-batch 0."), ("callback", "")],
)
def test_the_error_stands_last_and_its_traceback_once(where: str, note: str) -> None:
    """And nobody has to scroll: one line per rank, the user's frames, the error."""
    screen = screen_of(by_the_launcher(where, 1))
    error = f"Rank 1 (stage 1) failed: Broken: broken in {where}{note}"
    after = screen[screen.index(" failed: ") :].strip().splitlines()
    assert after[-1] == error, screen
    assert screen.count(error) == 3, screen  # a line of each rank, and the last one
    assert screen.count("Traceback") == 1, screen
    assert "in check" in screen
    assert "RemoteError" not in screen
    assert len(after) < 40, screen


def test_the_error_stands_last_where_another_arises_in_the_teardown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in Lightning's fetcher where a loader's worker processes can't be started."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    first = failing.Broken("in the data")
    failure = Failure.of(first, 0, 2)
    LastWord.install(first, failure, 0, lambda: None)
    try:
        try:
            raise first
        finally:
            raise RuntimeError("call iter first")
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    screen = capfd.readouterr().err
    assert "RuntimeError: call iter first" in screen
    assert screen.strip().splitlines()[-1] == str(failure).splitlines()[-1], screen


def test_the_error_stands_last_where_processes_are_forked() -> None:
    """Lightning handles errors in the process that waits for the others, not in these."""
    screen = screen_of(by_the_launcher("callback", 1, "fork"))
    for rank in range(2):
        assert f"[rank {rank}] Rank 1 (stage 1) failed: Broken: broken in callback" in screen
    last = "Rank 1 (stage 1) failed: Broken: broken in callback"
    assert screen.strip().splitlines()[-1] == last, screen
    assert "in check" in screen  # the traceback is the first error's
    assert "RemoteError" not in screen, screen


def test_a_forked_process_that_dies() -> None:
    """The launcher sends SIGTERM to the others at once, which isn't why the run ended."""
    screen = screen_of(by_the_launcher("kill", 1, "fork", ranks=3))
    for rank in (0, 2):
        assert f"[rank {rank}] Rank 1 (stage 1) failed: its process died" in screen


def test_a_forked_process_that_is_killed_is_named_last() -> None:
    """Also where the others are ended before they could tell."""
    for rank in range(2):
        last = screen_of(by_the_launcher("kill", rank, "fork")).strip().splitlines()[-1]
        assert last.startswith(f"Rank {rank} (stage {rank}) failed: its process died"), last


def test_a_forked_process_that_leaves_does_not_count_as_a_success() -> None:
    screen = screen_of(by_the_launcher("sysexit", 1, "fork"))
    assert "Rank 1 (stage 1) failed: SystemExit: 0" in screen


@pytest.mark.parametrize("where", failing.AROUND)
def test_a_rank_that_leaves_the_script_is_missed(where: str) -> None:
    """Else the others wait for it for half an hour, to begin a run."""
    start = time.monotonic()
    screen = screen_of(by_the_launcher(where, 1))
    assert "Rank 1 ended (exit code 0) while the others wait for it to begin a run." in screen
    assert time.monotonic() - start < 90


class Large(L.LightningModule):
    """Has weights that one rank can't send before the other takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.backbone(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fail_to_end(rank: int) -> None:
    strategy = failing.Strategy(2)
    run = trainer(max_steps=1, devices=2, strategy=strategy)

    def close(*_: Any) -> None:
        failing.fail("the end of the run")

    with pytest.MonkeyPatch.context() as patch:
        if int(os.environ["LOCAL_RANK"]) == rank:
            patch.setattr(PipelinedModule, "close", close)
        run.fit(Large(), DataLoader(torch.randn(8, 512), batch_size=8))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_the_end_of_a_run_on_one_rank(rank: int) -> None:
    with pytest.raises(RankError, match="broken in the end of the run") as caught:
        run_ranks(fail_to_end, 2, rank, timeout_s=60)
    _, *screens = re.split(r"\nrank \d:\n", str(caught.value))
    assert all("broken in the end of the run" in screen for screen in screens)


def test_notes_are_kept_where_errors_have_none() -> None:
    """As with Python 3.10."""
    error = SimpleNamespace()
    for text in ("one", "two"):
        add_note(error, text)  # type: ignore[arg-type]
    assert error.__notes__ == ["one", "two"]


def test_a_failed_child_is_not_seen_at_once() -> None:
    """Lightning kills all processes as soon as it sees one, before they can tell why."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        child = children.PatientlySeen(process, patience_s=1.0)
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
        place = draw.choice([*failing.PLACES, *failing.FIRST, *failing.SIGNALS, "exit"])
        where = 0 if place in failing.FIRST else draw.randrange(RANKS)
        with tempfile.TemporaryDirectory() as folder:
            _, codes, seconds = screens(place, where, Path(folder) / "run")
        assert all(code != 0 for code in codes)
        assert seconds < LIMIT_S
        print(f"{number + 1}: {place} on rank {where}: exit codes {codes} within {seconds:.1f} s")
    print(f"seed {seed}: {sys.argv[1]} runs, no hang")
