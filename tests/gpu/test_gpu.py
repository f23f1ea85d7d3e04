"""What only a GPU can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.gpu.runs import RECOMPUTE, Packed, peak, weights
from tests.ranks import run_ranks


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", [models.Around, models.Chained, models.Shared])
def test_one_stage_equals_a_plain_trainer(kind: type[models.Module], recompute: str) -> None:
    expected = run_ranks(weights, 1, kind, None)[0]
    assert_equal(run_ranks(weights, 1, kind, 1, recompute)[0], expected, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [models.Around, models.Chained, Packed])
def test_two_stages_on_one_gpu_have_the_weights_of_one(kind: type[models.Module]) -> None:
    expected = run_ranks(weights, 1, kind, 1)[0]
    assert_equal(run_ranks(weights, 2, kind, 2, "except_last", "gloo")[0], expected, 0)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_two_stages_over_nccl_have_the_weights_of_one(recompute: Any) -> None:
    expected = run_ranks(weights, 1, models.Chained, 1, recompute)[0]
    assert_equal(run_ranks(weights, 2, models.Chained, 2, recompute, "nccl")[0], expected, 0)


@pytest.mark.gpu
def test_the_gpu_as_default_device_changes_nothing() -> None:
    expected = run_ranks(weights, 2, models.Around, 2, "always", "gloo")[0]
    found = run_ranks(weights, 2, models.Around, 2, "always", "gloo", "cuda")[0]
    assert_equal(found, expected, 0)


@pytest.mark.gpu
def test_recomputing_saves_memory() -> None:
    always, except_last, never = (run_ranks(peak, 1, mode)[0] for mode in RECOMPUTE)
    assert always <= except_last < never
