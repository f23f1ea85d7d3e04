"""Train over a backend that grants no more than NCCL promises, in all its modes.

python -m tests.strict                          # the scenarios in the three hardest modes
python -m tests.strict --mode group:async       # in one mode
python -m tests.strict --all                    # in all nine, and a part of the suite
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.strict.scenarios import HARD, MODES, SCENARIOS, run

SUITE = (
    "tests/test_equality.py",
    "tests/test_replicas.py",
    "tests/test_bits.py",
    "tests/test_batchnorm.py",
    "tests/test_manual.py",
    "tests/test_precision.py",
)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser("python -m tests.strict", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all modes, and a part of the suite")
    parser.add_argument("--mode", action="append", choices=MODES, help="a mode, queue:issue")
    found = parser.parse_args(given)
    found.mode = found.mode or (MODES if found.all else HARD)
    return found


def suite(mode: str) -> str:
    """Run tests of the suite in a child process over the strict backend; returns what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "STRICT_MODE": mode, "STRICT_FOLDER": folder}
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "2400", *SUITE]
        done = subprocess.run(command, env=environment, check=False)
        violations = [path.read_text() for path in Path(folder).glob("violations.*")]
        used = any(Path(folder).glob("used.*"))
    if not used:
        return "the backend was not used"
    return "".join(violations) or ("" if done.returncode == 0 else "tests failed")


def main() -> int:
    """Run, print a line for each run, and return the exit code."""
    options, failed = arguments(), 0
    for mode in options.mode:
        for name in SCENARIOS:
            start = time.monotonic()
            ranks = run(name, mode)
            wrong = [text for found, _ in ranks for text in found]
            operations = sum(sum(counts.values()) for _, counts in ranks)
            failed += bool(wrong) or not operations
            took = time.monotonic() - start
            print(f"{mode:14} {name:26} {operations:7} operations {took:6.1f} s", *wrong[:3])
        if options.all:
            wrong = suite(mode)
            failed += bool(wrong)
            print(f"{mode:14} suite: {wrong or 'passed'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
