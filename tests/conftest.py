"""What holds for every test."""

from __future__ import annotations

import itertools
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


#: Files whose tests start scripts, each of which takes processors and seconds to import Lightning.
_WITH_SCRIPTS = {
    "test_checkpoint.py",
    "test_cli.py",
    "test_example.py",
    "test_failure.py",
    "test_launchers.py",
    "test_loggers.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread tests that start scripts among the others, so that they neither meet nor come last."""
    slow = [item for item in items if item.path.name in _WITH_SCRIPTS]
    others = iter([item for item in items if item.path.name not in _WITH_SCRIPTS])
    between = int(0.9 * (len(items) - len(slow)) / max(len(slow), 1))
    spread = [[item, *itertools.islice(others, between)] for item in slow]
    items[:] = [*itertools.chain.from_iterable(spread), *others]


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Lightning leaves its seed in the environment, where the next test would find it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
