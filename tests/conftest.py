"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    """One thread per process, here and in all that start."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Lightning leaves its seed in the environment, where the next test would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
