"""Several virtual stages on every stage: the same numbers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.test_bits import ConvNet
from tests.test_equality import CASES, STEPS, options_of, plain_run
from tests.training import train

#: Modules whose layers are at least four.
TABLE = [case for case in CASES if case != "same module twice"]


def of_case(case: str, stages: int, virtual: int, initial: dict[str, Tensor]) -> Any:
    kind, chunks = CASES[case]
    results = []
    for mode in ("always", 1):
        module = kind("sgd")
        module.load_state_dict(initial)
        strategy = GPipeStrategy(
            chunks,
            stages=stages,
            checkpoint=mode,  # type: ignore[arg-type]
            virtual_stages=virtual,
        )
        results.append(
            train(module, max_steps=STEPS, devices=stages, strategy=strategy, **options_of(case))
        )
    return results


@pytest.mark.parametrize("case", TABLE)
def test_weights_equal_a_plain_trainers(case: str) -> None:
    initial, expected = plain_run(case, "sgd")
    for state in run_ranks(of_case, 2, case, 2, 2, initial)[0]:
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


def weights(stages: int, virtual: int, replicas: int = 1) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = ConvNet().to(memory_format=torch.channels_last)
    strategy = GPipeStrategy(4, stages=stages, virtual_stages=virtual)
    return train(
        module,
        max_epochs=2,
        devices=stages * replicas,
        strategy=strategy,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        use_distributed_sampler=False,
    )


@pytest.mark.parametrize(("stages", "virtual"), [(1, 3), (2, 2), (2, 3), (3, 2), (3, 5)])
def test_bits_do_not_depend_on_the_number_of_virtual_stages(stages: int, virtual: int) -> None:
    expected = run_ranks(weights, 1, 1, 1)[0]
    state = run_ranks(weights, stages, stages, virtual)[0]
    assert [name for name, value in expected.items() if not torch.equal(value, state[name])] == []


class Rewritten(models.Module):
    """Layers that change their attributes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(
            *(nn.Linear(6, 6) if i % 3 else nn.BatchNorm1d(6) for i in range(7))
        ).double()
        torch.nn.utils.spectral_norm(self.backbone[1])
        prune.random_unstructured(self.backbone[4], "weight", 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(batch).square().mean()

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(48, 6, generator=generator, dtype=torch.float64), 12)  # type: ignore[arg-type]


def rewritten(stages: int, virtual: int, mode: str) -> dict[str, Tensor]:
    strategy = GPipeStrategy(4, virtual_stages=virtual, checkpoint=mode, step="micro-batch")  # type: ignore[arg-type]
    return train(Rewritten(), max_epochs=2, devices=stages, strategy=strategy)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_layers_may_change_themselves_beside_steps_of_micro_batches(mode: str) -> None:
    expected = run_ranks(rewritten, 1, 1, 1, mode)[0]
    state = run_ranks(rewritten, 2, 2, 3, mode)[0]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


def test_replicas() -> None:
    expected = run_ranks(weights, 4, 2, 1, 2)[0]
    state = run_ranks(weights, 4, 2, 2, 2)[0]
    torch.testing.assert_close(state, expected)


def partition() -> Any:
    strategy = GPipeStrategy(2, virtual_stages=2, balance=[1, 2, 1, 2])
    train(models.Module(), max_steps=1, devices=2, strategy=strategy)
    return strategy.partition


def test_parts_go_round() -> None:
    found = run_ranks(partition, 2)[0]
    assert found.stages == ((range(1), range(3, 4)), (range(1, 3), range(4, 6)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"virtual_stages": 0}, "virtual_stages must be a whole number from 1"),
        ({"virtual_stages": 7}, "fewer than 1 stages x 7 virtual stages: give virtual_stages=6"),
        ({"virtual_stages": 2, "balance": [6]}, "give 2 numbers"),
        ({"checkpoint": 1.5}, "a share of them from 0.0 to 1.0"),
        ({"checkpoint": -1}, "a whole number of micro-batches from 0"),
        ({"checkpoint": True}, "checkpoint must be one of"),
    ],
)
def test_refusals(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        train(models.Module(), max_steps=1, devices=1, strategy=GPipeStrategy(2, **options))
