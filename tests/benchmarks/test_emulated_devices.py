"""The benchmark runs and prints; how fast the engine is, ``python -m tests.benchmarks`` tells."""

from __future__ import annotations

import io
import json
import logging
import sys
from contextlib import redirect_stdout

import pytest

from tests.benchmarks import emulated_devices
from tests.ranks import run_ranks


def screen(*arguments: str) -> str:
    """What the benchmark prints on this rank."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["emulated_devices", *arguments])
        emulated_devices.main()
    logger.setLevel(level)
    return printed.getvalue()


def test_it_prints_a_share_of_the_bound() -> None:
    arguments = ("--stages", "2", "--chunks", "2", "--checkpoint", "never", "--steps", "4")
    first, second = run_ranks(screen, 2, *arguments)
    result = json.loads(first.splitlines()[-1])
    assert (result["checkpoint"], result["stages"], result["chunks"]) == ("never", 2, 2)
    assert 0 < result["efficiency"] < 1.05, "no step is shorter than its bound"
    assert result["bound_s"] > 3 * (emulated_devices.FORWARD_S + emulated_devices.BACKWARD_S)
    assert "{" not in second
