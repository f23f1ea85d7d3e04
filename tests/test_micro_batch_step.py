"""The step once per micro-batch: equal to a plain Trainer with the same weighted losses.

Each case runs in the first layout and three others, each layout with most cases. With WHOLE_TABLE=1
in the environment every case runs in every layout there is, which takes half an hour.
"""

from __future__ import annotations

import itertools
import os
import random
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from tests import step_models as models
from tests.ranks import run_ranks
from tests.test_precision import options_of
from tests.training import train

#: Module, M, and what the Trainer is told.
CASES: dict[str, tuple[type[models.Language], int, dict[str, Any]]] = {
    "head outside": (models.Language, 4, {}),
    "tied embedding": (models.Tied, 4, {}),
    "metric": (models.Measured, 4, {}),
    "weights by tokens": (models.Weighted, 4, {}),
    "weights and accumulation": (models.Weighted, 4, {"accumulate_grad_batches": 2}),
    "uneven": (models.Language, 5, {}),
    "fewer samples": (models.Language, 16, {}),
    "weights, tied and accumulation": (models.WeightedTied, 4, {"accumulate_grad_batches": 3}),
    "accumulation": (models.Tied, 4, {"accumulate_grad_batches": 3}),
    "clipping": (models.Tied, 4, {"gradient_clip_val": 0.05}),
    "16-mixed": (models.Half, 4, {"gradient_clip_val": 0.05}),
    "frozen": (models.Frozen, 4, {}),
    "values by the backbone": (models.Around, 4, {}),
    "masks and dicts": (models.Masked, 4, {}),
    "looped": (models.Looped, 4, {}),
    "GPT-2": (models.GPT2, 4, {}),
    "BERT": (models.Bert, 4, {}),
}
LARGE = ("GPT-2", "BERT")
#: Stages, virtual stages, checkpoint, schedule.
LAYOUTS: list[tuple[int, int, Any, str]] = [
    (1, 1, "except_last", "auto"),
    (1, 2, "always", "fill_drain"),
    (2, 1, "never", "searched"),
    (2, 2, "always", "interleaved"),
    (3, 1, 0.5, "1f1b"),
    (4, 2, "always", "auto"),
]
if "WHOLE_TABLE" in os.environ:
    modes, schedules = ("always", "except_last", 0.5, "never"), ("fill_drain", "1f1b", "searched")
    LAYOUTS = list(itertools.product((1, 2, 3, 4), (1, 2), modes, schedules))
STEPS = 4


def layouts_of(case: str) -> list[tuple[int, int, Any, str]]:
    if "WHOLE_TABLE" in os.environ:
        return LAYOUTS
    first, *others = LAYOUTS
    number = [*CASES].index(case)
    left_out = {(number + k) % len(others) for k in ((0, 2, 3) if case in LARGE else (0, 2))}
    return [first, *(layout for k, layout in enumerate(others) if k not in left_out)]


def normed(stages: int) -> dict[str, Tensor]:
    """Train with batch norm outside the backbone."""
    strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
    options: dict[str, Any] = {"devices": stages, "strategy": strategy}
    return train(models.Normed(), max_steps=2, limit_val_batches=0, **options)


class OneStep(models.Normed):
    """Moves its statistics once, by the batch's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def statistics(stages: int) -> dict[str, Tensor]:
    """The state after a step; with no stages, a plain Trainer's."""
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    return train(OneStep(), max_steps=1, limit_val_batches=0, **options)


def test_batch_norm_outside_the_backbone() -> None:
    expected = run_ranks(normed, 1, 1)[0]
    found = run_ranks(normed, 3, 3)[0]
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    plain = statistics(0)
    for stages in (1, 2):
        found = run_ranks(statistics, stages, stages)[0]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            key = f"before.{name}"
            torch.testing.assert_close(found[key], plain[key], rtol=0, atol=1e-12)
        assert found["behind.num_batches_tracked"] == 1


class Draws(models.Language):
    """Draws from Python's and NumPy's generators on both sides of the backbone."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.backbone(self.embed(tokens) * (1 + random.random()))
        logits: Tensor = self.head(hidden * (1 + random.random() + float(numpy.random.rand())))
        return logits


def drawn(stages: int) -> dict[str, Tensor]:
    """Train with numbers that the step draws."""
    strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
    options: dict[str, Any] = {"devices": stages, "strategy": strategy}
    return train(Draws(), max_steps=3, limit_val_batches=0, **options)


def test_what_the_step_draws_does_not_depend_on_the_stages() -> None:
    expected = run_ranks(drawn, 1, 1)[0]
    for stages in (2, 3):
        found = run_ranks(drawn, stages, stages)[0]
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@cache
def expected(case: str) -> dict[str, Tensor]:
    kind, chunks, options = CASES[case]
    module = models.with_weighted_losses(kind, chunks)()
    return train(module, max_steps=STEPS, limit_val_batches=0, **options, **precision(kind))


def precision(kind: type[models.Language]) -> dict[str, Any]:
    """A loss scaler of its own for each run, whose scale is too large at first."""
    return options_of("16-mixed") if kind is models.Half else {}


def of_case(case: str, layouts: list[tuple[int, int, Any, str]]) -> list[dict[str, Tensor]]:
    kind, chunks, options = CASES[case]
    states = []
    for stages, virtual, mode, schedule in layouts:
        strategy = GPipeStrategy(
            chunks,
            stages=stages,
            virtual_stages=virtual,
            checkpoint=mode,
            schedule=schedule,  # type: ignore[arg-type]
            step="micro-batch",
        )
        states.append(
            train(
                kind(),
                max_steps=STEPS,
                limit_val_batches=0,
                devices=stages,
                strategy=strategy,
                **options,
                **precision(kind),
            )
        )
    return states


@pytest.mark.timeout(1800 if "WHOLE_TABLE" in os.environ else 300)
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_a_plain_trainers(case: str) -> None:
    wanted = expected(case)
    chosen, found = layouts_of(case), []
    for _, same_stages in itertools.groupby(chosen, key=lambda layout: layout[0]):
        layouts = list(same_stages)
        for first in range(0, len(layouts), 6):  # each tensor takes a file descriptor
            some = layouts[first : first + 6]
            found += run_ranks(of_case, some[0][0], case, some, timeout_s=300)[0]
    for layout, state in zip(chosen, found, strict=True):
        names = [n for n in wanted if n in state and wanted[n].is_floating_point()]
        atol = 2e-3 if case == "16-mixed" else 1e-10
        torch.testing.assert_close(
            {n: state[n] for n in names}, {n: wanted[n] for n in names}, rtol=0, atol=atol
        )
        differ = [n for n in names if not torch.equal(state[n], found[0][n])]
        assert differ == [], f"other bits with {layout}"


def with_replicas(case: str, stages: int, virtual: int) -> dict[str, Tensor]:
    """Train with two replicas; with no stages, as DDP does."""
    kind, chunks, options = CASES[case]
    if not stages:
        module = models.with_weighted_losses(kind, chunks)()
        return train(module, max_steps=STEPS // 2, devices=2, strategy="ddp", **options)
    strategy = GPipeStrategy(chunks, stages=stages, virtual_stages=virtual, step="micro-batch")
    more = {"devices": 2 * stages, "strategy": strategy, "limit_val_batches": 0, **options}
    return train(kind(), max_steps=STEPS // 2, **more)


@pytest.mark.parametrize("case", ["tied embedding", "weights and accumulation", "GPT-2"])
def test_replicas(case: str) -> None:
    wanted = run_ranks(with_replicas, 2, case, 0, 1)[0]
    one = run_ranks(with_replicas, 2, case, 1, 1)[0]
    torch.testing.assert_close(one, wanted, rtol=0, atol=1e-10)
    for stages, virtual in ((2, 2), (3, 1)):
        state = run_ranks(with_replicas, 2 * stages, case, stages, virtual)[0]
        torch.testing.assert_close(state, one, rtol=0, atol=1e-10)
