"""Random generators of the user's own give the same numbers on every stage."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import functional

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import trainer

GLOBAL = np.random.default_rng()


class Draws(models.Module):
    """Draws from generators that nobody has seeded, in hooks and in steps."""

    def build(self) -> None:
        super().build()
        self.numpy = np.random.default_rng()
        self.old = [np.random.RandomState()]
        self.deep = SimpleNamespace(rng=random.Random())
        self.own = torch.Generator(device="cpu")
        self.own.seed()
        self.late: Any = None
        self.drawn: list[float] = []

    def draw(self) -> float:
        numbers = [
            self.numpy.random(),
            self.old[0].rand(),
            self.deep.rng.random(),
            torch.rand((), generator=self.own, dtype=torch.float64, device="cpu").item(),
            GLOBAL.random(),
        ]
        self.drawn += map(float, numbers)
        return sum(map(float, numbers))

    def on_fit_start(self) -> None:
        self.draw()

    def on_train_epoch_start(self) -> None:
        self.late = np.random.default_rng()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.drawn.append(float(self.late.random()))
        share = self.draw()
        return functional.mse_loss(self(x * share), y * share)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draw()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) * self.draw()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mixes(Callback):
    """A callback with a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.drawn.append(self.rng.random())


def drawn(step: Any) -> tuple[list[float], list[Any]]:
    """What a rank draws, and what it makes of that."""
    module = Draws()
    strategy = GPipeStrategy(chunks=2, step=step)
    runner = trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=[Mixes()])
    runner.fit(module)
    predictions = runner.predict(module, module.train_dataloader())
    found = torch.cat([p for p in predictions or [] if isinstance(p, Tensor)])
    return module.drawn, found.tolist()


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_every_stage_draws_the_same(step: str) -> None:
    first, second = run_ranks(drawn, 2, step)
    assert len(first[0]) > 20
    assert first == second


class Unseeded(Draws):
    """Makes generators in its steps, of which no two processes give the same numbers."""

    kind = "noise"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        rng = np.random.default_rng()
        noise = torch.from_numpy(rng.normal(size=tuple(x.shape)))
        if self.kind == "noise":
            x = x + noise
        elif self.kind == "share":
            x = x * float(rng.random())
        elif self.kind == "seeded":
            x = x * self.numpy.random() + torch.from_numpy(self.numpy.normal(size=tuple(x.shape)))
            x = x + torch.rand(x.shape, generator=self.own, dtype=x.dtype, device="cpu").to(x)
        elif self.kind == "torch":
            own = torch.Generator(device="cpu")
            own.seed()
            x = x + torch.randn(x.shape, generator=own, dtype=x.dtype, device="cpu").to(x.device)
        elif self.kind == "place":
            x = x[:, int(rng.integers(1 << 30)) % 1 :] * (1 + rng.integers(1 << 30))
        else:
            self.log("time", noise.mean() / 2)
        return functional.mse_loss(self(x), y)


def warned(kind: str) -> int:
    """How often a rank is told of a module whose steps compute with other numbers."""
    module = Unseeded()
    module.kind = kind
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(strategy=GPipeStrategy(chunks=2, step="micro-batch"), devices=2, max_epochs=1).fit(
            module
        )
    return sum("other numbers than stage" in str(each.message) for each in found)


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [
        ("noise", True),
        ("share", True),
        ("torch", True),
        ("place", True),
        ("time", False),
        ("seeded", False),
    ],
)
def test_numbers_that_differ_are_told_of(kind: str, is_told: bool) -> None:
    assert sum(run_ranks(warned, 2, kind)) == is_told


class Samples(models.Module):
    """Draws before the backbone, and of its output."""

    def build(self) -> None:
        super().build()
        self.own = torch.Generator(device="cpu").manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        noise = torch.randn(x.shape, dtype=x.dtype, generator=self.own, device="cpu").to(x.device)
        out = self(x + noise)
        odds = out.detach().softmax(-1).to("cpu")
        labels = torch.multinomial(odds, 1, generator=self.own)[:, 0].to(x.device)
        return functional.mse_loss(out, noise) + functional.cross_entropy(out, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(stages: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Samples()
    strategy = GPipeStrategy(chunks=3, step="micro-batch")
    trainer(strategy=strategy, devices=stages, max_epochs=2).fit(module)
    return module.state_dict()


def test_a_generator_that_one_stage_alone_draws_from_goes_on_alike_on_all() -> None:
    for stages in (2, 3):
        torch.testing.assert_close(run_ranks(trained, stages, stages)[0], trained(1))


class Noise(torch.nn.Module):
    """Draws from a generator that others have, too."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def forward(self, x: Tensor) -> Tensor:
        return x + float(self.rng.random())


class Together(models.Module):
    """Draws from the generator of a layer."""

    def build(self) -> None:
        super().build()
        self.rng = np.random.default_rng(3)
        self.backbone.append(Noise(self.rng))
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(self.rng.random())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(self.rng.random())
        return super().training_step(batch, batch_idx)


def drawn_together(stages: int, step: Any) -> list[float]:
    module = Together("sgd")
    trainer(strategy=GPipeStrategy(2, step=step), devices=stages, max_steps=3).fit(module)
    return module.drawn


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_a_step_may_draw_from_the_generator_of_a_layer(step: str, stages: int) -> None:
    expected = np.random.default_rng(3).random(3 * (2 if step == "mini-batch" else 3)).tolist()
    assert run_ranks(drawn_together, stages, stages, step) == [expected] * stages
