"""Manual optimization: several optimizers, toggling, several backwards in a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train

WIDTH = models.WIDTH


class Gan(models.Module):
    """A generator outside the backbone against a discriminator that is cut, or the reverse."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.backbone = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)))
        )
        self.other = nn.Linear(WIDTH, WIDTH)

    def generate(self, z: Tensor) -> Tensor:
        return torch.tanh(self.other(z))

    def judge(self, x: Tensor) -> Tensor:
        return self.backbone(x).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        real, z = batch
        generator, discriminator = self.optimizers()
        fake = self.generate(z)
        if self.toggles:
            self.toggle_optimizer(generator)
        loss = nn.functional.softplus(-self.judge(fake)).mean()
        self.log("generator_loss", loss)
        self.manual_backward(loss)
        self.clip_gradients(generator, 0.05, "norm")
        generator.step()
        generator.zero_grad()
        if self.toggles:
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(discriminator)
        discriminator.zero_grad()
        for scale in (1.0, 0.5):  # gradients of several backwards add up
            self.manual_backward(scale * nn.functional.softplus(-self.judge(real)).mean())
            self.manual_backward(scale * nn.functional.softplus(self.judge(fake.detach())).mean())
        self.clip_gradients(discriminator, 0.05, "value")
        discriminator.step()
        if self.toggles:
            self.untoggle_optimizer(discriminator)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def parts(self) -> tuple[nn.Module, nn.Module]:
        return self.other, self.backbone

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in self.parts()]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]


class Untoggled(Gan):
    toggles = False


class Reverse(Gan):
    """The generator is cut."""

    def generate(self, z: Tensor) -> Tensor:
        return torch.tanh(self.backbone(z))

    def judge(self, x: Tensor) -> Tensor:
        return self.other(x).mean(1)

    def parts(self) -> tuple[nn.Module, nn.Module]:
        return self.backbone, self.other


class Accumulating(Gan):
    """Steps every third batch, as with gradient accumulation by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        _, optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            self.manual_backward(self.judge(batch[0]).square().mean() / 3)
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


class OverAgain(Gan):
    """Two backwards through one graph, whose stages begin with layers that work in place."""

    def build(self) -> None:
        models.InPlace.build(self)  # type: ignore[arg-type]
        self.other = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        _, optimizer = self.optimizers()
        score = self.judge(batch[0].clone())
        self.manual_backward(score.square().mean(), retain_graph=True)
        self.manual_backward(score.mean())
        optimizer.step()
        optimizer.zero_grad()


KINDS = {kind.__name__: kind for kind in (Gan, Untoggled, Reverse, Accumulating, OverAgain)}
OPTIONS = {"limit_train_batches": 6, "max_epochs": 2}


def by_pipelines(kind: str, state: Any, stages: int) -> dict[str, Any]:
    results = {}
    for mode in ("always", "except_last", "never"):
        module = KINDS[kind]()
        module.load_state_dict(state)
        strategy = GPipeStrategy(3, stages=stages, checkpoint=mode)  # type: ignore[arg-type]
        devices = torch.distributed.get_world_size()
        results[mode] = train(module, devices=devices, strategy=strategy, **OPTIONS)
    return results


def by_ddp(kind: str, state: Any) -> dict[str, Any]:
    module = KINDS[kind]()
    module.load_state_dict(state)
    return train(module, devices=2, strategy=DDPStrategy(find_unused_parameters=True), **OPTIONS)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_a_plain_trainer(kind: str, stages: int) -> None:
    torch.manual_seed(0)
    module = KINDS[kind]()
    state = copy.deepcopy(module.state_dict())
    expected = train(module, devices=1, **OPTIONS)
    for name in state:
        assert not (name.startswith("backbone.") and torch.equal(expected[name], state[name]))
    for result in run_ranks(by_pipelines, stages, kind, state, stages)[0].values():
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["Gan", "Reverse", "Accumulating"])
def test_equal_to_plain_ddp(kind: str) -> None:
    torch.manual_seed(0)
    state = KINDS[kind]().state_dict()
    expected = run_ranks(by_ddp, 2, kind, state)[0]
    for result in run_ranks(by_pipelines, 4, kind, state, 2)[0].values():
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
