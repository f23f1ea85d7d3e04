"""However the processes are started, the weights are the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy import _lightning, advice
from lightning_gpipe.strategy.launcher import MultiProcessingLauncher
from tests import forked, scripts
from tests.models import Around
from tests.ranks import free_port
from tests.scripts import Script
from tests.training import train, trainer

ROOT = Path(__file__).parents[1]
CLUSTER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM")


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(CLUSTER)}
    return {**clean, **more}


def run(commands: list[tuple[list[str], dict[str, str]]], start: Any) -> None:
    """Run commands at the same time."""
    processes = [
        start(
            command,
            env=environment(**variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        screens = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), screens


def script(start_method: str, nodes: int, out: Path) -> list[str]:
    return ["-m", "tests.launched", start_method, str(nodes), str(out)]


def commands(launcher: str, out: Path) -> list[tuple[list[str], dict[str, str]]]:
    port = str(free_port())
    if launcher in ("popen", "spawn", "fork"):
        return [([sys.executable, *script(launcher, 1, out)], {})]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        return [([sys.executable, *torchrun, *script("popen", 1, out)], {})]
    if launcher == "two nodes":
        nodes = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [
            ([sys.executable, *script("popen", 2, out)], {**nodes, "NODE_RANK": str(node)})
            for node in range(2)
        ]
    job = {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": port,
    }
    return [
        (
            [sys.executable, *script("popen", 1, out)],
            {**job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(2)
    ]


def test_slurm_announces_the_end(tmp_path: Path) -> None:
    """Its signal comes to every task in the middle of a step; they save together, after it."""
    processes = [
        Script(
            [*command, "1000000"],
            env=environment(**variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, variables in commands("SLURM", tmp_path / "weights")
    ]
    saved = tmp_path / "hpc_ckpt_1.ckpt"
    screen = ""
    try:
        for line in processes[0].stdout or ():
            screen += line
            if "Expected bubble" in line:
                break
        time.sleep(1)
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 30
        while not saved.exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)
        assert [process.poll() for process in processes] == [None, None], screen
        state = torch.load(saved, weights_only=True)["state_dict"]
        assert list(state) == list(Around().state_dict())
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def expected() -> Any:
    torch.manual_seed(5)
    module = Around()
    run = trainer(devices=1, max_epochs=1)
    run.fit(module)
    return module.state_dict(), dict(run.callback_metrics)


@pytest.mark.parametrize("launcher", ["popen", "spawn", "fork", "torchrun", "two nodes", "SLURM"])
def test_a_launcher(launcher: str, expected: Any, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    start = Script if launcher in ("fork", "two nodes", "SLURM") else subprocess.Popen
    run(commands(launcher, out), start)
    torch.testing.assert_close(torch.load(out), expected, rtol=0, atol=1e-10)


FIRST = """
import sys
from lightning_gpipe import GPipeStrategy, PipelineMonitor
from tests.models import Around
from tests.training import trainer

if __name__ == "__main__":
    strategy, again = (GPipeStrategy(3, start_method="fork") for _ in range(2))
    if sys.argv[1] == "one stage":
        trainer(devices=1, strategy=strategy, max_epochs=1).fit(Around())
    else:
        data = next(iter(Around().train_dataloader()))
        assert strategy.plan(Around(), data, devices=2, memory="1GB", device="cpu").best
    monitor = PipelineMonitor()
    run = trainer(devices=2, strategy=again, max_epochs=1, callbacks=[monitor])
    run.fit(Around())
    assert len(monitor.figures.stages) == 2
    print("trained on", run.strategy.stages)
"""


@pytest.mark.parametrize("first", ["one stage", "a plan"])
def test_processes_can_be_started_after_what_a_notebook_did(first: str, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(FIRST)
    command = [sys.executable, str(tmp_path / "notebook.py"), first]
    code, screen = scripts.run(
        command, 120, cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}
    )
    assert code == 0, screen
    assert screen.rstrip().endswith("trained on 2"), screen


ALONE = """
import os
import sys
import torch
from lightning_gpipe import GPipeStrategy
from tests.models import Around
from tests.training import trainer

if __name__ == "__main__":
    torch.manual_seed(5)
    module = Around()
    if "LOCAL_RANK" not in os.environ:
        trainer(devices=1, strategy=GPipeStrategy(3), max_epochs=1).fit(module)
    run = trainer(devices=2, strategy=GPipeStrategy(3), max_epochs=1)
    run.fit(module)
    if run.global_rank == 0:
        torch.save(module.state_dict(), sys.argv[1])
    print("trained on", run.strategy.stages)
"""


def test_the_first_process_may_have_trained_alone(tmp_path: Path) -> None:
    """It went on alone, in the group of one that its first run had left, and others waited."""
    (tmp_path / "train.py").write_text(ALONE)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "weights")]
    code, screen = scripts.run(
        command, 120, cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}
    )
    assert code == 0, screen
    assert screen.count("trained on 2") == 2, screen
    torch.manual_seed(5)
    module = Around()
    for _ in range(2):
        trainer(devices=1, max_epochs=1).fit(module)
    found = torch.load(tmp_path / "weights")
    torch.testing.assert_close(found, module.state_dict(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("arguments", "given"), [([], True), (["-c"], False)])
def test_a_script_that_is_in_no_file(arguments: list[str], given: bool) -> None:
    text = "from tests.launched import main; main('popen', 1, 'never')"
    ended = subprocess.run(
        [sys.executable, *arguments, *([] if given else [text])],
        input=text if given else None,
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode, ended.stderr
    assert "came from standard input or 'python -c'. Put it into a file" in ended.stderr
    assert "Rank 1 ended" not in ended.stderr


def test_copies_of_what_a_script_starts_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    advice.warn_in_child()  # not here
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with pytest.warns(UserWarning, match=r"with all that it starts.*start_method='spawn'"):
        advice.warn_in_child()


OTHER_NUMBER = """
import sys
from lightning_gpipe import GPipeStrategy
from tests.models import Around
from tests.training import trainer

if __name__ == "__main__":
    for devices in map(int, sys.argv[1:]):
        trainer(devices=devices, strategy=GPipeStrategy(3), max_epochs=1).fit(Around())
"""


def test_an_earlier_trainers_processes_are_too_few(tmp_path: Path) -> None:
    first, then = 2, 3
    (tmp_path / "train.py").write_text(OTHER_NUMBER)
    command = [sys.executable, str(tmp_path / "train.py"), str(first), str(then)]
    code, screen = scripts.run(
        command, 120, cwd=ROOT, env={**environment(), "PYTHONPATH": str(ROOT)}
    )
    assert code, screen
    said = f"has started {first} processes, and this one has {then}. A script runs from its top"
    assert said in screen, screen


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked for in /proc")
def test_a_process_whose_backwards_use_threads_is_not_forked() -> None:
    named, over = threading.Event(), threading.Event()

    def as_autograd_does() -> None:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        comm.write_text("pt_autograd_0")
        named.set()
        over.wait()

    thread = threading.Thread(target=as_autograd_does)
    thread.start()
    try:
        assert named.wait(timeout=30)
        with pytest.raises(RuntimeError, match="Restart the notebook's kernel"):
            train(Around(), devices=2, strategy=GPipeStrategy(3, start_method="fork"))
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("what", [run.__name__ for run in forked.RUNS])
def test_the_process_that_has_forked_others(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.forked", what, str(tmp_path)]
    code, screen = scripts.run(command, 240, cwd=ROOT, env=environment())
    assert code == 0, screen


def test_processes_of_a_notebook_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lightning, "IS_INTERACTIVE", True)
    strategy: Any = trainer(devices=2, strategy=GPipeStrategy(4)).strategy
    assert isinstance(strategy.launcher, MultiProcessingLauncher)
    assert strategy.launcher._start_method == "fork"
    for start_method in ("popen", "spawn"):
        with pytest.raises(RuntimeError, match="a notebook is no script"):
            trainer(devices=2, strategy=GPipeStrategy(4, start_method=start_method))


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_a_worker_of_joblib_says_what_starts_there(
    start_method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``multiprocessing`` has no context of the name that joblib gives there."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "loky")
    with pytest.raises(RuntimeError, match=r'can.t start processes here.*start_method="fork"'):
        trainer(devices=2, strategy=GPipeStrategy(4, start_method=start_method)).fit(Around())
