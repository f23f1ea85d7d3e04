"""Passes over layers without values leave none of their tensors in what user code keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_gpipe.model import own_state
from lightning_gpipe.model.on_meta import Pretended, to_meta_leaf
from lightning_gpipe.model.places import Place
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.cost import layer_flops
from lightning_gpipe.plan.memory import layer_memories
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.plan.step_memory import output_of
from lightning_gpipe.tensors.microbatch import Split
from lightning_gpipe.tensors.tree import Tree

KEPT: list[Tensor] = []


class Keeps(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        KEPT.append(input)
        return super().forward(input)


class Takes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + KEPT[-1]


def sample() -> Tensor:
    return torch.zeros(8, 4)


def whole_and_outline(layers: Sequence[nn.Module]) -> None:
    passes, batch = PerSample(layers, 2, nullcontext), Tree.of(sample(), "The input")
    assert not passes.whole(batch, run_layer)
    assert passes.outline(batch, run_layer, Split.plan(batch, 2)) is not None


def output(layers: Sequence[nn.Module]) -> Tree:
    place = Pretended(torch.device("cpu"))
    return output_of(layers, run_layer, to_meta_leaf(sample(), place), place)


PASSES: dict[str, Callable[[Sequence[nn.Module]], object]] = {
    "flops": lambda layers: layer_flops(layers, run_layer, sample()),
    "memory": lambda layers: layer_memories(layers, run_layer, sample()),
    "output": output,
    "samples": whole_and_outline,
}


@pytest.mark.parametrize("name", PASSES)
def test_a_layer_finds_what_those_before_it_have_kept(name: str) -> None:
    first = torch.zeros(8, 4)
    KEPT[:] = [first]
    PASSES[name]([Keeps(4, 4), Takes(), Keeps(4, 4), Takes()])
    assert len(KEPT) == 1
    assert KEPT[0] is first
    KEPT.clear()
    PASSES[name]([Keeps(4, 4), Takes()])
    assert not KEPT


class State:
    def __init__(self) -> None:
        self.calls, self.seen = 0, ["none"]


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.state = State()

    def forward(self, input: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.seen.append(f"call {self.state.calls}")
        return super().forward(input) * self.state.calls


@pytest.mark.parametrize("name", PASSES)
def test_objects_of_layers_are_as_they_were(name: str) -> None:
    """A count that a layer keeps in an object began where the passes had left it."""
    layers = [Counts(), nn.Tanh(), Counts()]
    PASSES[name](layers)
    for layer in (layers[0], layers[2]):
        assert isinstance(layer, Counts)
        assert vars(layer.state) == {"calls": 0, "seen": ["none"]}


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class CountsAnywhere(nn.Linear):
    """Counts in a namespace, an array, a tensor of an object, a slot, a class and a global."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.namespace, self.array = SimpleNamespace(calls=0), np.zeros(1)
        self.object, self.slotted = State(), Slotted()
        self.object.tensor = torch.zeros(1)  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        global calls
        calls += 1
        CountsAnywhere.calls += 1
        self.namespace.calls += 1
        self.slotted.calls += 1
        self.array += 1
        self.object.tensor += 1  # type: ignore[attr-defined]
        return super().forward(input)


calls = 0


@pytest.mark.parametrize("name", PASSES)
def test_nothing_is_counted_anywhere(name: str) -> None:
    layers = [CountsAnywhere(), nn.Tanh()]
    PASSES[name](layers)
    layer: Any = layers[0]
    found = layer.namespace.calls, layer.array[0], layer.object.tensor[0], layer.slotted.calls
    assert (*found, CountsAnywhere.calls, calls) == (0,) * 6


def test_what_is_imported_meanwhile_stays() -> None:
    package = ModuleType("package")
    put_back = Place("package", package).keep()
    package.inner, package.calls = ModuleType("package.inner"), 1  # type: ignore[attr-defined]
    put_back()
    assert {"inner", "calls"} & vars(package).keys() == {"inner"}


@pytest.mark.parametrize("name", PASSES)
def test_what_code_keeps_is_looked_for_once_a_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    class Counted(own_state._OwnState):
        def put_back(self, extent: own_state.Extent = "tensors") -> None:
            looks.append(extent)
            super().put_back(extent)

    monkeypatch.setattr(own_state, "_OwnState", Counted)
    PASSES[name]([Keeps(4, 4) for _ in range(20)])
    assert 0 < len(looks) <= 4


def test_tensors_without_values_are_copied() -> None:
    weight = torch.zeros(2, requires_grad=True)
    with Pretended(torch.device("cpu")).mode:
        first, second, made = copy.deepcopy([weight, weight, torch.tensor(0.5)])
    assert first is second
    assert first is not weight
    assert first.requires_grad
    assert isinstance(made, FakeTensor)
