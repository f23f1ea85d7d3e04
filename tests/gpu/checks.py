"""What a machine with a GPU can tell in ten minutes."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import lightning
import torch

from tests import models
from tests.gpu import runs
from tests.ranks import run_ranks

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Args:
        check: What was looked at.
        outcome: What came of it: "right", "wrong", or a number.
        seconds: How long it took.
    """

    check: str
    outcome: str
    seconds: float


def marked_tests(left_s: float) -> str:
    """Every test with the mark ``gpu``."""
    return _pytest(["-m", "gpu", "tests/gpu"], left_s / 2)


def suite(backend: str, left_s: float) -> str:
    """A part of the suite, whose Trainers all train on the first GPU."""
    in_parallel = importlib.util.find_spec("xdist") is not None
    workers = ["-n", str(max(2, (os.cpu_count() or 2) - 2)), "--dist", "loadfile"]
    return _pytest([*(workers if in_parallel else []), *SUITE], left_s, GPU_SUITE=backend)


def _pytest(wanted: Sequence[str], limit_s: float, **environment: str) -> str:
    """Run tests; what failed goes to standard error."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *wanted]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"wrong: not through after {limit_s:.0f} s"
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    last = done.stdout.strip().rpartition("\n")[2] or done.stderr.strip().rpartition("\n")[2]
    return f"{'right' if done.returncode == 0 else 'wrong'}: {last}"


def against_plain(left_s: float) -> str:
    """K = 1 over CUDA against a plain Trainer."""
    plain, one = (run_ranks(runs.weights, 1, models.Around, stages)[0] for stages in (None, 1))
    worst = max(float((one[name] - value).abs().max()) for name, value in plain.items())
    return f"{'right' if worst <= 1e-10 else 'wrong'}: weights differ by {worst:.1e} at most"


def two_on_one(left_s: float) -> str:
    """Two stages on one GPU, over gloo, against one."""
    one = run_ranks(runs.weights, 1, models.Around, 1)[0]
    two = run_ranks(runs.weights, 2, models.Around, 2, "except_last", "gloo")[0]
    equal = all(torch.equal(two[name], value) for name, value in one.items())
    return "right: the same bits" if equal else "wrong: other bits"


def memory(left_s: float) -> str:
    """The most memory by recompute mode and M."""
    peaks = {
        (mode, chunks): run_ranks(runs.peak, 1, mode, chunks)[0] / 2**20
        for mode in runs.RECOMPUTE
        for chunks in (4, 16)
    }
    return ", ".join(f"{mode} M={m} {peak:.0f} MiB" for (mode, m), peak in peaks.items())


def speed(left_s: float) -> str:
    """A step of one stage and one micro-batch over a plain Trainer's, the median of rounds."""
    ratios = []
    for _ in range(5):
        plain, one = (run_ranks(runs.step_time, 1, stages)[0] for stages in (None, 1))
        ratios.append(one / plain)
    return f"{statistics.median(ratios):.3f} of a plain Trainer's step, {plain * 1e3:.1f} ms"


def host_time(left_s: float) -> str:
    """The host's time for an action, by recompute mode."""
    times = {mode: run_ranks(runs.host_time, 1, mode)[0] * 1e6 for mode in runs.RECOMPUTE}
    return ", ".join(f"{mode} {value:.0f} us" for mode, value in times.items())


SUITE = [
    f"tests/test_{name}.py"
    for name in (
        *("equality", "bits", "precision", "batchnorm", "manual", "replicas", "resume", "life"),
        *("micro_batch_step", "virtual_stages", "held_activations", "inputs", "failure"),
    )
]
CHECKS: dict[str, Callable[[float], str]] = {
    "marked-tests": marked_tests,
    "plain": against_plain,
    "two-on-one": two_on_one,
    "memory": memory,
    "speed": speed,
    "host-time": host_time,
    "suite-gloo": partial(suite, "gloo"),
    "suite-nccl": partial(suite, "nccl"),
}
LONG = ("suite-gloo", "suite-nccl")  # minutes each


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Which checks to run."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    without = f"a check to run; without it all but {' and '.join(LONG)}"
    parser.add_argument("--only", action="append", choices=CHECKS, help=without)
    found = parser.parse_args(given)
    found.only = found.only or [name for name in CHECKS if name not in LONG]
    return found


def machine() -> str:
    """What the numbers were measured with."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if cuda else "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "-"
    return (
        f"{torch.cuda.device_count()} x {device}; torch {torch.__version__}, CUDA"
        f" {torch.version.cuda or '-'}, NCCL {nccl}, Lightning {lightning.__version__}, Python"
        f" {platform.python_version()}"
    )


def table(rows: Sequence[Row]) -> str:
    """The rows, one to a line, below what they were measured with."""
    width = max((len(row.check) for row in rows), default=0)
    lines = [f"{row.check:{width}}  {row.seconds:6.1f} s  {row.outcome}" for row in rows]
    return "\n".join([machine(), *lines])


def _run(name: str, left_s: float, pipe: Connection) -> None:
    try:
        outcome = CHECKS[name](left_s)
    except Exception as error:
        outcome = f"wrong: {type(error).__name__}: {str(error).strip()[-300:]}"
    pipe.send(outcome)


def measure(name: str, left_s: float) -> Row:
    """Run a check in a process of its own, which ends when the time is up."""
    start = time.monotonic()
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(name, left_s, theirs))
    process.start()
    outcome = ours.recv() if ours.poll(left_s) else f"wrong: not through after {left_s:.0f} s"
    process.join(5)
    if process.is_alive():
        process.kill()
    return Row(name, outcome, time.monotonic() - start)


def main(given: Sequence[str] | None = None) -> int:
    """Run the checks, print the table, and return the exit code."""
    options = arguments(given)
    if not torch.cuda.is_available():
        print(f"No CUDA device here ({machine()}): nothing to run.")
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end, rows = time.monotonic() + LIMIT_S, []
    for name in options.only:
        left_s = end - time.monotonic()
        rows.append(measure(name, left_s) if left_s > 5 else Row(name, "wrong: no time left", 0.0))
        print(f"{name}: {rows[-1].outcome}", flush=True)
    print(f"\n{table(rows)}")
    return int(any(row.outcome.startswith("wrong") for row in rows))
