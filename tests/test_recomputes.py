"""What a step changes for a call of the backbone, and puts back: the recompute finds it again."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import train

FACTOR: ContextVar[float] = ContextVar("FACTOR", default=1.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    factor: float = 1.0


class Layer(nn.Module):
    """Uses much that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), torch.sigmoid
        self.handle: Any = None
        self.kind, self.settings, self.more = torch.float64, Settings(), torch.ones(9000, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.linear(x)).to(self.kind) * self.settings.factor * FACTOR.get()
        return x + hidden.to(x.dtype) * self.more[0] * float(os.environ.get("TEST_FACTOR", "1"))


@contextmanager
def hooked(layer: Layer) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda *given: given[-1] * 1.5)
    yield
    handle.remove()


@contextmanager
def hooked_inside(layer: Layer) -> Iterator[None]:
    with layer.linear.register_forward_pre_hook(lambda _, given: (given[0] * 1.5,)):
        yield


@contextmanager
def unhooked(layer: Layer) -> Iterator[None]:
    """A hook that is off for the call alone."""
    if layer.handle is not None:
        layer.handle.remove()
    yield
    layer.handle = layer.register_forward_hook(lambda *given: given[-1] * 1.5)


@contextmanager
def cleared(layer: Layer) -> Iterator[None]:
    """A hook that goes without its handle."""
    layer.register_forward_hook(lambda *given: given[-1] * 1.5)
    yield
    layer._forward_hooks.clear()


@contextmanager
def once(layer: Layer) -> Iterator[None]:
    """A hook that takes itself off, and its handle too, and has changed nothing then."""

    def see(*_: Any) -> None:
        layer.handle.remove()
        del layer.handle

    layer.handle = layer.register_forward_hook(see)
    yield
    layer.handle = None


@contextmanager
def put(layer: Layer, name: str, value: Any) -> Iterator[None]:
    before = layer.__dict__.get(name)
    layer.__dict__[name] = value
    yield
    if before is None:
        del layer.__dict__[name]
    else:
        layer.__dict__[name] = before


@contextmanager
def forward_of_another(layer: Layer) -> Iterator[None]:
    forward = layer.forward
    with put(layer, "forward", lambda x: forward(x) * 1.5):
        yield


@contextmanager
def variable(_: Layer) -> Iterator[None]:
    token = FACTOR.set(1.5)
    yield
    FACTOR.reset(token)


@contextmanager
def environment(_: Layer) -> Iterator[None]:
    os.environ["TEST_FACTOR"] = "1.5"
    yield
    os.environ.pop("TEST_FACTOR", None)


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a hook": hooked,
    "a hook inside": hooked_inside,
    "no hook yet": unhooked,
    "a cleared hook": cleared,
    "a hook that is called once": once,
    "a function": lambda layer: put(layer, "act", torch.tanh),
    "a forward": forward_of_another,
    "a type": lambda layer: put(layer, "kind", torch.float32),
    "settings": lambda layer: put(layer, "settings", Settings(1.5)),
    "a context variable": variable,
}
UNKNOWN: dict[str, Callable[[Layer], Any]] = {
    "a large tensor": lambda layer: put(layer, "more", torch.full((9000, WIDTH), 1.5)),
    "the environment": environment,
}


class Changing(models.Module):
    """Changes something for the call."""

    def __init__(self, change: str, optimizer: Any = "sgd") -> None:
        super().__init__(optimizer)
        self.change = change

    def build(self) -> None:
        self.backbone = nn.Sequential(*(Layer() for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        changes = (CHANGES | UNKNOWN)[self.change]
        contexts = [changes(layer) for layer in self.backbone]
        for context in contexts:
            context.__enter__()
        out = self.backbone(x)
        for context in reversed(contexts):
            context.__exit__(None, None, None)
        return nn.functional.mse_loss(out, y)


def trained(
    change: str, stages: int, step: Any = "mini-batch", checkpoint: Any = "except_last"
) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    module, options = Changing(change), dict[str, Any]()
    if stages:
        strategy = GPipeStrategy(4, step=step, checkpoint=checkpoint)
        options = {"devices": stages, "strategy": strategy}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        state = train(module, max_steps=3, **options)
    assert FACTOR.get() == 1.0  # also where the first step ends at its call of the backbone
    return state, [str(w.message) for w in found if "recompute" in str(w.message)]


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_recompute_finds_what_its_forward_found(change: str, step: str) -> None:
    expected, _ = trained(change, 0)
    for stages in (1, 2):
        for found, told in run_ranks(trained, stages, change, stages, step):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
            assert told == []


class Closure(nn.Linear):
    """Sets a function that holds what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        held = Held(hidden.detach())
        self.last = lambda: held
        return hidden


class Held:
    """A tensor, until nobody holds it."""

    alive = most = 0

    def __init__(self, value: Tensor) -> None:
        self.value = value
        Held.alive += 1
        Held.most = max(Held.most, Held.alive)

    def __del__(self) -> None:
        Held.alive -= 1


class Closures(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(Closure(WIDTH, WIDTH), nn.Tanh(), Closure(WIDTH, WIDTH))


def test_functions_hold_nothing_for_a_recompute() -> None:
    strategy = GPipeStrategy(12, checkpoint="always")
    train(Closures("sgd"), max_steps=2, devices=1, strategy=strategy)
    assert 2 <= Held.most <= 8


@pytest.mark.parametrize("change", UNKNOWN)
def test_other_values_in_a_recompute_are_told(change: str) -> None:
    for stage, (_, told) in enumerate(run_ranks(trained, 2, change, 2, "mini-batch", "always")):
        assert len(told) == 1
        layers = f"layers {2 * stage} to {2 * stage + 1} of the backbone gave other values"
        assert layers in told[0]
    assert trained(change, 1, checkpoint="never")[1] == []
