"""The engine keeps close to the schedule's bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def efficiency(stages: int, chunks: int, mode: str) -> float:
    command = ["-m", "tests.benchmarks.emulated_devices", "--checkpoint", mode]
    done = subprocess.run(
        [sys.executable, *command, "--stages", str(stages), "--chunks", str(chunks)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return float(json.loads(line)["efficiency"])


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize(("stages", "chunks"), [(4, 8), (8, 32)])
def test_at_least_nine_tenths_of_the_bound(stages: int, chunks: int, mode: str) -> None:
    measured: list[float] = []
    for _ in range(6):  # machines are shared: what one quiet run reaches, the engine can do
        measured.append(efficiency(stages, chunks, mode))
        if measured[-1] >= 0.9:
            return
    pytest.fail(f"measured {measured} of the bound, expected 0.9")
