"""Layers may keep state in attributes, no buffers: neither the cut nor the recompute may show.

A layer that counts its calls to warm up was recomputed with the count that all micro-batches had
left: the gradients were those of another function.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.engine.attributes import LayerAttributes
from lightning_gpipe.schedule.checkpoint import Checkpoint
from tests.in_process import (
    InProcess,
    among_others,
    check_as_written,
    check_cuts_and_modes,
    inputs,
)

WIDTH, LARGE = 4, 5000


class Warming(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.last = nn.Linear(WIDTH, WIDTH), 0, "none"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = f"call {self.calls}"
        return x + min(1.0, self.calls / 30) * self.linear(x)


class Cooling(Warming):
    """Lowers a temperature that is a tensor, and no buffer."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.temperature = in_place, torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.temperature.mul_(0.9)
        else:
            self.temperature = 0.9 * self.temperature
        return self.linear(x) * self.temperature.item()


class Unnoticed(Cooling):
    """Changes the tensor so that its version stays."""

    def __init__(self) -> None:
        super().__init__(in_place=True)

    def forward(self, x: Tensor) -> Tensor:
        self.temperature.data.mul_(0.9)
        return self.linear(x) * self.temperature.item()


class Seldom(Cooling):
    """Changes the tensor in every second call: two micro-batches meet the same."""

    def __init__(self) -> None:
        super().__init__(in_place=True)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            self.temperature.mul_(0.9)
        return self.linear(x) * self.temperature.item()


class Carries(Warming):
    """Hands a state of two tensors from call to call, as an LSTM's."""

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.state or (x.new_ones(1), x.new_ones(1))
        self.state = (hidden * 0.9, cell + hidden.square())
        return self.linear(x) * hidden + cell.tanh()


class CarriesInPlace(Carries):
    """Changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (torch.ones(1).double(), torch.ones(1).double())

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.state or ()
        hidden.mul_(0.9)
        return self.linear(x) * hidden.item() + cell.add_(hidden).item()


class Reads(nn.Module):
    """Reads the tensor that another layer changes."""

    def __init__(self, temperature: Tensor) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(WIDTH, WIDTH), temperature

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.temperature.item()


class State:
    def __init__(self) -> None:
        self.calls, self.more = 0, {"calls": 0}


class InObject(nn.Module):
    """Counts its calls in an object, and in a dict of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(WIDTH, WIDTH), State()

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.more["calls"] += 2
        return self.linear(x) * (self.state.calls + self.state.more["calls"]) / 10


class Percent(OrderedDict[str, float]):
    """Makes something else of what it holds, in the order in which its entries were moved."""

    def __getitem__(self, name: str) -> float:
        return super().__getitem__(name) / 100

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value * 2)


class InOrder(nn.Module):
    """Reads from one, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shares = nn.Linear(WIDTH, WIDTH), Percent(first=2.0, other=40.0)
        self.shares.move_to_end("first")

    def forward(self, x: Tensor) -> Tensor:
        self.shares["first"] = 1 + self.shares["first"]
        self.shares.move_to_end("other" if len(next(iter(self.shares))) == 5 else "first")
        return self.linear(x) * self.shares["first"] + self.shares["other"]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Counting(nn.Module):
    """Counts its calls somewhere.

    Args:
        state: Where.
        count: Counts once more, and tells how many there were.
    """

    def __init__(self, state: Any, count: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.linear, self.state, self.count = nn.Linear(WIDTH, WIDTH), state, [count]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + float(self.count[0](self)) / 10)


def in_entry(layer: Any) -> float:
    layer.state[0] += 1
    return float(layer.state[0])


def in_key(layer: Any) -> float:
    key = max(layer.state, default=0)
    layer.state.pop(key, None)
    layer.state[key + 1] = True
    return float(key + len(layer.state))


def in_slot(layer: Any) -> float:
    layer.state.calls += 1
    return float(layer.state.calls)


def in_length(layer: Any) -> float:
    layer.state.append(0)
    return len(layer.state)


def in_tuple(layer: Any) -> float:
    layer.state = (*layer.state, 1)
    return len(layer.state)


def in_number(layer: Any) -> float:
    layer.state = layer.state + 1
    return float(layer.state)


def in_tensor(layer: Any) -> float:
    layer.state[0] += 1
    return float(layer.state[0])


class Sharing(nn.Sequential):
    """A layer whose two parts share a tensor."""

    def __init__(self) -> None:
        first = Cooling(in_place=True)
        super().__init__(first, Reads(first.temperature))


class Calls(Warming):
    """Calls a function once, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.begin: Callable[[Tensor], Tensor] | None = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        if self.begin is not None:
            self.begin(x)
            self.begin = None
        return super().forward(x)


class Weighted(Warming):
    """Has a weight of its own, that a parametrization changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.weight


class FirstTime(Warming):
    """Does something else the first time, and keeps a large tensor from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if self.table is None else 0.5
        if self.table is None:
            self.table = torch.full((LARGE,), 2.0, dtype=x.dtype)
            self.made = True
        return factor * self.linear(x) * self.table[0]


class Holds(nn.Module):
    """Keeps what it is given in a new list each time, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(WIDTH, WIDTH), [""]

    def forward(self, x: Tensor) -> Tensor:
        self.held = [str(x.tolist())]
        return self.linear(x)


class Renames(Warming):
    """Counts its calls in the name of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.after_0 = True

    def forward(self, x: Tensor) -> Tensor:
        (name,) = (name for name in vars(self) if name.startswith("after_"))
        calls = int(name.removeprefix("after_")) + 1
        delattr(self, name)
        setattr(self, f"after_{calls}", True)
        return self.linear(x) * (1 + calls / 10)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "counter": Warming,
    "tensor, replaced": lambda: Cooling(in_place=False),
    "tensor, in place": lambda: Cooling(in_place=True),
    "tensor, in place without a new version": Unnoticed,
    "tensor, in place at times": Seldom,
    "tensor of two modules": Sharing,
    "function, once": Calls,
    "object": InObject,
    "ordered dict that computes": InOrder,
    "list": lambda: Counting([0], in_entry),
    "default dict": lambda: Counting(defaultdict(int), in_entry),
    "key of a default dict": lambda: Counting(defaultdict(bool), in_key),
    "array": lambda: Counting(np.zeros(1), in_entry),
    "slots": lambda: Counting(Slotted(), in_slot),
    "namespace": lambda: Counting(SimpleNamespace(calls=0), in_slot),
    "list that grows": lambda: Counting([], in_length),
    "deque": lambda: Counting(deque(), in_length),
    "tuple": lambda: Counting((), in_tuple),
    "number of NumPy": lambda: Counting(np.int64(0), in_number),
    "fraction": lambda: Counting(Fraction(0), in_number),
    "tuple of tensors": Carries,
    "tuple of tensors, in place": CarriesInPlace,
    "tensor in a list": lambda: Counting([torch.zeros(1)], in_tensor),
    "parametrized": lambda: nn.utils.parametrizations.orthogonal(Weighted()),
    "first time": FirstTime,
    "list, replaced": Holds,
    "name": Renames,
}


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_layers_change_do_not_depend_on_cut_or_mode(kind: str) -> None:
    check_cuts_and_modes(among_others(KINDS[kind]), inputs())


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_layers_change_are_a_plain_modules(kind: str) -> None:
    check_as_written(among_others(KINDS[kind]), inputs())


@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_leaves_no_trace(kind: str) -> None:
    left = []
    for mode in ("never", "always"):
        layer: nn.Module = among_others(KINDS[kind])[0]
        pipeline = InProcess(nn.Sequential(layer), (1,), 4, mode)
        for step, value in enumerate(inputs()):
            pipeline.step(value, step)
        pipeline.executor.close()
        state = {"calls", "last", "temperature", "made", "table", "held"} & vars(layer).keys()
        left.append({name: str(vars(layer)[name]) for name in state})
    assert left[0] == left[1]


@pytest.mark.parametrize("before", [[], (object(),), torch.zeros(2, requires_grad=True)])
@pytest.mark.parametrize("after", [(1, 2), 3.0])
def test_a_value_that_is_kept_from_now_on(before: Any, after: Any) -> None:
    """In the place of one that isn't."""
    layer = Warming()
    layer.turn = before
    attributes = LayerAttributes([layer])
    attributes.met()
    layer.turn = after
    met = attributes.met()
    layer.turn = later = "another"
    with attributes.restored(met):
        assert layer.turn == after
        layer.turn = before
    assert layer.turn == later


def grows(layer: Any) -> float:
    layer.state.extend([0] * 3000)
    return 0.0


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_list_that_grows_large_is_left_as_it_is(mode: Checkpoint) -> None:
    """Between the forward and the recompute it became too large to look at."""
    layer = Counting([], grows).double()
    InProcess(nn.Sequential(layer), (1,), 4, mode).step(inputs()[0])
    assert len(layer.state) >= 4 * 3000
