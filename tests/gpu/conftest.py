"""Tests that need a GPU are skipped where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("gpu")
        wanted = mark.args[0] if mark is not None and mark.args else 1
        if mark is not None and torch.cuda.device_count() < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s)"))
