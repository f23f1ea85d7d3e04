"""What layers cost, and that counting it leaves no trace in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.model.on_meta import UntraceableLayer
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.cost import function_costs, layer_flops, step_costs

WIDTH, SAMPLES = 8, 4
PRODUCT = 2 * SAMPLES * WIDTH * WIDTH  # operations of one matrix product
ELEMENTS = SAMPLES * WIDTH


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def costs(layers: list[nn.Module], recomputes: bool = False) -> list[float]:
    return step_costs(layer_flops(layers, run_layer, torch.ones(SAMPLES, WIDTH)), recomputes)


def test_a_backward_counts_the_products_that_it_computes() -> None:
    """The first layer's input wants no gradient."""
    once, twice, thrice = PRODUCT + ELEMENTS, 2 * (PRODUCT + ELEMENTS), 3 * PRODUCT + 2 * ELEMENTS
    assert costs(linears(2)) == [twice, thrice]
    assert costs(linears(2), recomputes=True) == [twice + once, thrice + once]


def test_frozen_layers_count_what_their_backward_computes() -> None:
    """Nothing before the first trainable one, the gradient that passes through behind it."""
    layers = linears(4)
    for i in (0, 2):
        layers[i].requires_grad_(False)
    forward, backward = PRODUCT + ELEMENTS, PRODUCT + ELEMENTS
    assert costs(layers) == [
        forward,
        forward + backward,
        forward + backward,
        forward + backward + PRODUCT,
    ]
    assert costs(layers, recomputes=True)[0] == forward


class Traces(nn.Module):
    """Leaves traces in every way that a layer can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.log: list[int] = []
        self.cache: dict[str, Any] = {}
        self.table = torch.arange(float(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        self.cache["last"] = x
        self.last = x
        self.seen += 1
        self.table += 1
        random.random()
        numpy.random.rand()
        torch.rand(1)
        return self.inner(x) + self.table


def test_counting_leaves_no_trace() -> None:
    layer, hooked = Traces(), []
    layer.register_forward_hook(lambda *_: hooked.append(1))
    layer.inner[1].eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    costs([layer])
    assert (layer.calls, layer.log, layer.cache, hooked) == (0, [], {}, [])
    assert not hasattr(layer, "last")
    assert layer.table.tolist() == list(range(WIDTH))
    assert [m.training for m in layer.modules()] == [True, True, True, False, True]
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert numpy.random.get_state()[1].tolist() == generators[2]
    assert all(p.grad is None for p in layer.parameters())
    layer(torch.ones(SAMPLES, WIDTH))
    assert hooked == [1]


class Box:
    """Holds a tensor."""

    table: Tensor | None = None


class Boxed(nn.Linear):
    """Keeps a tensor in an object of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.box = Box()

    def forward(self, x: Tensor) -> Tensor:
        self.box.table = 2 * x.detach()
        return super().forward(x)


@pytest.mark.parametrize(
    "parametrize", [lambda layer: layer, nn.utils.parametrizations.weight_norm]
)
def test_objects_of_layers_keep_no_tensors_without_values(
    parametrize: Callable[[nn.Module], Any],
) -> None:
    layer = parametrize(Boxed())
    costs([layer])
    assert layer.box.table is None


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.SyncBatchNorm(WIDTH),
        lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.Sequential(nn.LeakyReLU(inplace=True), nn.Flatten()),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16).requires_grad_(False),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_that_are_special_in_training_are_counted(build: Callable[[], nn.Module]) -> None:
    assert costs([build()])[0] >= ELEMENTS


def test_compiled_layers_are_counted_without_compiling_them() -> None:
    compiled: Any = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")
    assert costs([compiled]) == costs(linears(1))


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_layer_that_reads_values_is_named() -> None:
    with pytest.raises(UntraceableLayer, match="Reads can't run on the meta device"):
        costs([Reads()])


@pytest.mark.parametrize(
    ("cost", "found"),
    [
        (lambda layer, x: float("nan"), "got nan for layer 0"),
        (lambda layer, x: float("inf"), "got inf for layer 0"),
        (lambda layer, x: -1, r"got -1 for layer 0 \(Linear\)"),
        (lambda layer, x: None, "got None for layer 0"),
        (lambda layer, x: x.sum(), "got a tensor without a value"),
    ],
)
def test_a_cost_that_is_no_finite_number_is_named(
    cost: Callable[[nn.Module, Any], Any], found: str
) -> None:
    with pytest.raises(ValueError, match=f"must return a finite number from 0, {found}"):
        function_costs(linears(2), run_layer, torch.ones(SAMPLES, WIDTH), cost)


def breaking(layer: nn.Module, x: Any) -> float:
    return {}["cost"]


def test_a_cost_function_that_fails_is_named() -> None:
    message = rf"The balance function breaking of {__name__} raised an error for layer 0 \(Linear\)"
    with pytest.raises(ValueError, match=message) as caught:
        function_costs(linears(2), run_layer, torch.ones(SAMPLES, WIDTH), breaking)
    assert isinstance(caught.value.__cause__, KeyError)


def test_costs_may_be_numbers_of_any_kind() -> None:
    kinds = iter([numpy.float64(2.5), numpy.int64(2), torch.tensor(3.0), True])
    found = function_costs(
        linears(4), run_layer, torch.ones(SAMPLES, WIDTH), lambda layer, x: next(kinds)
    )
    assert found == [2.5, 2.0, 3.0, 1.0]
