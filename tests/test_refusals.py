"""Optimizers that need the whole model are refused by what they do, not by their name alone."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.plan.optimizer_state import couples_parameters
from lightning_gpipe.strategy.optimizer_refusals import refuse_optimizers
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train


class Search(torch.optim.LBFGS):
    """LBFGS under another name."""


class Sharp(torch.optim.SGD):
    """SAM under another name."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Needs(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("kind", [Search, Sharp, Needs])
def test_an_optimizer_over_all_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} needs all parameters .* SGD or AdamW"):
        refuse_optimizers([kind(nn.Linear(2, 2).parameters(), lr=0.1)])


@pytest.mark.parametrize(
    "name", ["Adam", "Adafactor", "Muon", "NAdam", "Rprop", "SparseAdam", "ASGD", "RMSprop"]
)
def test_optimizers_by_parameter_are_not_refused(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this version of torch has no {name}")
    refuse_optimizers([kind(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)])


class Normalized(torch.optim.SGD):
    """Steps along the gradient of the whole model, of length 1."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([p.grad.flatten() for p in weights]).norm()  # type: ignore[union-attr]
        with torch.no_grad():
            for p in weights:
                p.sub_(p.grad / norm, alpha=0.1)  # type: ignore[operator]
        return loss


class Slow(torch.optim.Optimizer):
    """Steps by the mean of all gradients so far, which the second step sees first."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = state.get("sum", 0.0) + sum(
                    float(other.grad.mean())
                    for other in group["params"]
                    if "sum" in self.state[other]
                )
                p.sub_(p.grad * state["sum"])


class Signs(torch.optim.SGD):
    """Steps parameter by parameter, by a rule of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * p.grad.norm(), alpha=group["lr"])
        return closure() if closure is not None else None


@pytest.mark.parametrize("kind", [Normalized, Slow])
def test_an_optimizer_that_looks_at_all_gradients_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"In a step of {kind.__name__} where a parameter goes"):
        refuse_optimizers([kind(nn.Linear(2, 2).parameters(), lr=0.1)])


@pytest.mark.parametrize("name", ["Signs", "Langevin", "Twice"])
def test_one_that_looks_at_each_is_not_refused(name: str) -> None:
    weights, state = [*nn.Linear(2, 2).parameters()], torch.get_rng_state()
    before = [p.clone() for p in weights]
    optimizer = globals()[name](weights, lr=0.1)
    refuse_optimizers([optimizer])
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(weights, before, rtol=0, atol=0)


class Twice(torch.optim.SGD):
    """Evaluates again where a step along the whole gradient leads."""

    def step(self, closure: Any = None) -> Any:
        closure()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Centered(torch.optim.SGD):
    """Centres gradients, which it takes to be there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.sub_(parameter.grad.mean())
        super().step()
        return loss


class Module(models.Module):
    kind: type[torch.optim.Optimizer] = Twice
    fails = False
    nothing: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.nothing.grad if self.fails else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)


def fit(stages: int, kind: Any = Twice, fails: bool = False) -> None:
    module = Module()
    module.kind, module.fails = kind, fails
    train(module, max_steps=1, devices=stages, strategy=GPipeStrategy(2))


def test_two_gradients_in_a_step_are_refused_over_stages() -> None:
    with pytest.raises(RankError, match=r"A step of Twice computes gradients twice\. Twice"):
        run_ranks(fit, 2, 2)
    run_ranks(fit, 1, 1)


class Drawn(models.Module):
    """A learning rate that every process draws for itself, in a list of others."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = 0.1 + int(os.environ["LOCAL_RANK"]) / 8
        groups = [
            {"params": p, "lr": rate if i == 2 else 0.1} for i, p in enumerate(self.parameters())
        ]
        return torch.optim.SGD(groups, lr=0.1)


def fit_drawn() -> None:
    train(Drawn(), max_steps=1, devices=2, strategy=GPipeStrategy(2))


def test_options_that_stages_drew_for_themselves_are_refused() -> None:
    text = r"SGD's parameter group 2 has lr=0.1 on stage 0, and lr=0.225 on stage 1: every process"
    with pytest.raises(RankError, match=text):
        run_ranks(fit_drawn, 2)


def test_a_step_that_needs_all_gradients_is_told_which_are_missing() -> None:
    text = r"NoneType.*[\s\S]*In a step of Centered parameters that other stages hold have no grad"
    with pytest.raises(RankError, match=text):
        run_ranks(fit, 2, 2, Centered)
    run_ranks(fit, 1, 1, Centered)
    with pytest.raises(RankError, match=r"NoneType.* no attribute 'grad'") as error:
        run_ranks(fit, 2, 2, Centered, True)
    assert "In a step of" not in str(error.value)


class Langevin(torch.optim.SGD):
    """Adds noise to every weight it steps."""

    own = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for i, p in enumerate(self.param_groups[0]["params"]):
            if p.grad is not None:
                generator = torch.Generator().manual_seed(i) if self.own else None
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=0.01)
        return loss


class Noisy(models.Around):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(())  # as on every stage
        return super().training_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        if self.how == "hooks":
            for p in self.parameters():
                p.register_hook(lambda g: g + torch.randn(g.shape, dtype=g.dtype))

    def configure_optimizers(self) -> Any:
        kind = torch.optim.SGD if self.how == "hooks" else Langevin
        Langevin.own = self.how == "own"
        return kind(self.parameters(), lr=0.1)


def add_noise(how: str, stages: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return train(Noisy(how), max_epochs=1, devices=stages, strategy=GPipeStrategy(3))


@pytest.mark.parametrize(
    ("how", "message"),
    [("hooks", "A hook on a parameter draws"), ("optimizer", "Langevin draws random numbers")],
)
def test_noise_that_each_stage_would_draw_for_itself_is_refused(how: str, message: str) -> None:
    add_noise(how)
    with pytest.raises(RankError, match=message):
        run_ranks(add_noise, 2, how, 2)


def test_noise_of_a_generator_for_each_parameter_is_that_of_one_stage() -> None:
    torch.testing.assert_close(run_ranks(add_noise, 2, "own", 2)[0], add_noise("own"))


class Energy(nn.Module):
    """Descends a function of its own."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.inner, self.functional = nn.Linear(6, 6), functional

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            return x - torch.func.grad(lambda y: self.inner(y).tanh().sum())(x)
        y = x if x.requires_grad else x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(y).tanh().sum(), y, create_graph=True)
        return x - slope


class Descends(models.Around):
    functional = False

    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(Energy(self.functional) for _ in range(4)))


class DescendsFunctionally(Descends):
    functional = True


def descend(kind: type[Descends], checkpoint: Any, stages: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    strategy = GPipeStrategy(3, checkpoint=checkpoint, balance="params")
    return train(kind(), max_epochs=1, devices=stages, strategy=strategy)


@pytest.mark.parametrize("kind", [Descends, DescendsFunctionally])
def test_gradients_in_a_forward_need_its_activations(kind: type[Descends]) -> None:
    for checkpoint in ("always", "except_last"):
        with pytest.raises(RuntimeError, match=r"use GPipeStrategy\(checkpoint='never'\)"):
            descend(kind, checkpoint, 1)
    found = run_ranks(descend, 2, kind, "never", 2)[0]
    torch.testing.assert_close(found, descend(kind, "never", 1))


def test_an_optimizers_step_may_be_a_mock() -> None:
    """Whose function has no module."""
    step = torch.optim.Adam.step
    with patch("torch.optim.Adam.step", autospec=True, side_effect=step):
        assert not couples_parameters(torch.optim.Adam([nn.Parameter(torch.ones(2))]))
