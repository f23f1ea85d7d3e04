"""The heart: whatever the module, the stages and the mode, the weights are a plain Trainer's."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train

STEPS = 3  # the first cuts the model, the last two use what the optimizer keeps
CASES: dict[str, tuple[type[models.Module], int]] = {  # module, M
    "plain": (models.Module, 4),
    "plain, one micro-batch": (models.Module, 1),
    "around": (models.Around, 4),
    "skip": (models.Skip, 4),
    "two calls": (models.TwoCalls, 3),
    "chained": (models.Chained, 4),
    "chained, outputs dropped": (models.ChainedAndDropped, 4),
    "shared weights": (models.Shared, 4),
    "same module twice": (models.SameModule, 3),
    "in place": (models.InPlace, 3),
    "trees": (models.Trees, 3),
    "lengths": (models.Lengths, 4),
    "flattened": (models.Flattened, 3),
    "ten samples": (models.Ten, 4),
    "few samples": (models.Few, 8),
    "frozen": (models.Frozen, 8),
    "accumulation": (models.Around, 4),
}
#: The modes in which each optimizer trains: what it does with gradients doesn't depend on them.
MODES = {"sgd": ("always", "never"), "adamw": ("except_last",)}


def options_of(case: str) -> dict[str, Any]:
    return {"accumulate_grad_batches": 3} if case == "accumulation" else {}


def pipeline_runs(
    case: str, stages: int, initial: dict[str, dict[str, torch.Tensor]]
) -> dict[tuple[str, str], Any]:
    """Train a case in every mode, and with two optimizers, on this rank."""
    kind, chunks = CASES[case]
    results = {}
    for optimizer, state in initial.items():
        for mode in MODES[optimizer]:
            module = kind(optimizer)
            if (
                int(torch.distributed.get_rank()) == 0
            ):  # the other stages must get the first one's weights
                module.load_state_dict(state)
            strategy = GPipeStrategy(chunks, stages=stages, checkpoint=mode)
            results[optimizer, mode] = train(
                module, max_steps=STEPS, devices=stages, strategy=strategy, **options_of(case)
            )
    return results


@cache  # the same for every number of stages
def plain_run(case: str, optimizer: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a case with a plain Trainer; returns the state before and after."""
    torch.manual_seed(1)
    kind, _ = CASES[case]
    module = kind(optimizer)
    initial = copy.deepcopy(module.state_dict())
    expected = train(module, max_steps=STEPS, devices=1, **options_of(case))
    for name, parameter in module.named_parameters():
        moved = not torch.equal(parameter, initial[name])
        assert moved == parameter.requires_grad, (
            f"{name} should {'' if parameter.requires_grad else 'not '}move"
        )
    return initial, expected


@pytest.mark.parametrize(
    ("case", "stages"),
    [*itertools.product(CASES, (1, 2, 4)), ("plain", 3), ("trees", 3), ("chained", 3)],
)
def test_weights_equal_a_plain_trainers(case: str, stages: int) -> None:
    initial, expected = {}, {}
    for optimizer in MODES:
        initial[optimizer], expected[optimizer] = plain_run(case, optimizer)
    whole = run_ranks(pipeline_runs, stages, case, stages, initial)[0]
    for (optimizer, mode), state in whole.items():
        assert list(state) == list(expected[optimizer])
        for name, tensor in state.items():
            torch.testing.assert_close(
                tensor,
                expected[optimizer][name],
                rtol=0,
                atol=1e-10,
                msg=lambda text, name=name, optimizer=optimizer, mode=mode: (
                    f"{name} ({optimizer}, {mode}): {text}"
                ),
            )
