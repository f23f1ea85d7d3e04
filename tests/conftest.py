"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    """One thread per process, here and in all that start, and a faster start for them."""
    os.environ["OMP_NUM_THREADS"] = "1"
    start, paths = str(Path(__file__).parent / "start"), os.environ.get("PYTHONPATH", "")
    if start not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{start}{os.pathsep}{paths}" if paths else start
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Lightning leaves its seed in the environment, where the next test would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
