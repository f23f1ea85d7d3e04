"""What only a GPU can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models, step_models
from tests.gpu.runs import (
    RECOMPUTE,
    Beside,
    Compiled,
    OnMeta,
    Packed,
    Waiting,
    monitored,
    peak,
    synchronizations,
    weights,
)
from tests.ranks import run_ranks

#: Gradients that come from several calls are added in an order that depends on the cut.
KINDS = [
    *((models.Around, 0), (Packed, 0), (Beside, 0)),
    *((models.Chained, 1e-12), (OnMeta, 1e-12)),
]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", [models.Around, models.Chained, models.Shared])
def test_one_stage_equals_a_plain_trainer(kind: type[models.Module], recompute: str) -> None:
    expected = run_ranks(weights, 1, kind, None)[0]
    assert_equal(run_ranks(weights, 1, kind, 1, recompute)[0], expected, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("kind", "atol"), KINDS)
def test_two_stages_have_the_weights_of_one(
    kind: type[models.Module], atol: float, backend: str
) -> None:
    expected = run_ranks(weights, 1, kind, 1)[0]
    first, second = run_ranks(weights, 2, kind, 2, "except_last", backend)
    assert_equal({**second, **first}, expected, atol)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_four_stages_over_nccl_have_the_weights_of_one(recompute: Any) -> None:
    expected = run_ranks(weights, 1, models.Around, 1, recompute)[0]
    assert_equal(run_ranks(weights, 4, models.Around, 4, recompute, "nccl")[0], expected, 0)


@pytest.mark.gpu
def test_the_gpu_as_default_device_changes_nothing() -> None:
    expected = run_ranks(weights, 2, models.Around, 2, "always", "gloo")[0]
    found = run_ranks(weights, 2, models.Around, 2, "always", "gloo", "cuda")[0]
    assert_equal(found, expected, 0)


@pytest.mark.gpu
def test_recomputing_saves_memory() -> None:
    always, except_last, never = (run_ranks(peak, 1, mode, 4)[0] for mode in RECOMPUTE)
    assert always <= except_last < never


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_host_does_not_wait_per_micro_batch(recompute: str) -> None:
    few, many = (run_ranks(synchronizations, 1, models.Around, m, recompute)[0] for m in (2, 8))
    assert few == many


@pytest.mark.gpu
def test_the_host_does_not_wait_per_micro_batch_step() -> None:
    few, many = (
        run_ranks(synchronizations, 1, step_models.Measured, m, "never", "micro-batch")[0]
        for m in (2, 8)
    )
    assert few == many


@pytest.mark.gpu
def test_a_wait_of_the_host_is_counted() -> None:
    few, many = (run_ranks(synchronizations, 1, Waiting, m, "never")[0] for m in (2, 8))
    assert sum(many.values()) == 4 * sum(few.values()) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_compiled_layers(recompute: str) -> None:
    expected = run_ranks(weights, 1, Compiled, 1, recompute)[0]
    assert_equal(run_ranks(weights, 2, Compiled, 2, recompute, "nccl")[0], expected, 1e-12)


@pytest.mark.gpu
def test_the_monitor_measures_what_the_gpu_does() -> None:
    found = run_ranks(monitored, 1)[0]
    assert found["peak"] > 0
    assert found["4 layers"] / found["2 layers"] == pytest.approx(4, rel=0.1)
