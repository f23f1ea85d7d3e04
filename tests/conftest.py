"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Lightning leaves its seed in the environment, where the next test would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
