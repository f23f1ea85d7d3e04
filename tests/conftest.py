"""What holds for every test."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    """One thread per process, here and in all that start, and a fast start for these."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    tests = Path(__file__).parent
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    wanted = [str(tests / "start"), str(tests.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*wanted, *filter(None, paths)]))
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported stays: no collection needs to look at it, which takes half a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is left at the end is told of as leaked


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Lightning leaves its seed in the environment, where the next test would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
