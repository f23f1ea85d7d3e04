"""What layers take, measured, and that measuring it leaves no trace in them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.cost import step_costs
from lightning_gpipe.plan.settings import Settings
from lightning_gpipe.plan.timing import UntimableLayer, layer_times
from tests import models
from tests.benchmarks.workloads import SleepingLayer
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.test_bits import ConvNet
from tests.test_blocks import pipelined
from tests.test_memory import Reads
from tests.training import DEVICE, train

CPU = torch.device("cpu")
#: What layers told of their runs, for copies are thrown away.
TOLD: list[Any] = []
tell = TOLD.append  # a list that layers name would be put back


@pytest.fixture(autouse=True)
def told() -> list[Any]:
    TOLD.clear()
    return TOLD


class Clock:
    """Goes by what layers say that they take."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gpipe.plan.timing.time.perf_counter", CLOCK.read)


class Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        CLOCK.now += forward_s
        tell("F")
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        CLOCK.now += ctx.seconds
        tell("B")
        return gradient, gradient.sum(0), None, None


class Layer(nn.Module):
    def __init__(self, forward_s: float = 0.003, backward_s: float = 0.005) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Taking.apply(x, self.weight, *self.seconds)


def costs(layers: list[nn.Module], sample: Any = None, chunks: int = 1, **options: Any) -> Any:
    sample = torch.ones(10, WIDTH) if sample is None else sample
    recomputes = options.pop("recomputes", False)
    options = {"trains": True, "training": False, **options}
    return step_costs(layer_times(layers, run_layer, sample, chunks, CPU, **options), recomputes)


def test_forward_recompute_and_backward_count(clock: None) -> None:
    layers = [Layer(0.003, 0.005), Layer(0.001, 0.01)]
    assert costs(layers) == pytest.approx([0.008, 0.011], abs=1e-4)
    assert costs(layers, recomputes=True) == pytest.approx([0.011, 0.012], abs=1e-4)
    assert costs(layers, trains=False) == pytest.approx([0.003, 0.001], abs=1e-4)


def test_frozen_layers_take_what_their_backward_computes(clock: None) -> None:
    """Nothing before the first trainable one; behind it the gradient passes through."""
    layers = [Layer() for _ in range(3)]
    for i in (0, 2):
        layers[i].requires_grad_(False)
    assert costs(layers, recomputes=True) == pytest.approx([0.003, 0.011, 0.011], abs=1e-4)
    assert costs(layers[::2]) == pytest.approx([0.003, 0.003], abs=1e-4)
    wanting = torch.ones(10, WIDTH, requires_grad=True)
    assert costs(layers[:1], wanting) == pytest.approx([0.008], abs=1e-4)
    assert wanting.grad is None


def test_slow_layers_run_less_often(clock: None) -> None:
    """After a run that warms up."""
    for forward_s, runs in ((2.0, 1), (0.3, 2), (0.1, 5), (0.001, 20)):
        TOLD.clear()
        costs([Layer(forward_s, 0.0)], trains=False)
        assert len(TOLD) == pytest.approx(1 + runs, abs=1)
    TOLD.clear()
    costs([Layer(0.001, 0.0) for _ in range(1000)], trains=False)
    assert len(TOLD) <= 1000 * 7


class Tells(nn.Module):
    """Tells what it is called with, and how."""

    def forward(self, value: Any) -> Any:
        x, mask = value
        here = torch.is_autocast_enabled(DEVICE), self.training, torch.is_grad_enabled()
        tell((len(x), len(mask), here, x.is_inference()))
        return value


def test_the_first_micro_batch_is_measured() -> None:
    """A mask as long as the batch is whole."""

    class Masked(Tells):
        def forward(self, value: Any) -> Any:
            x, mask = super().forward(value)
            return mask @ x, mask

    x, mask = torch.ones(10, 10, WIDTH), torch.ones(10, 10)
    with torch.inference_mode():
        x, mask = x.clone(), mask.clone()
        costs([Masked(), Masked().eval()], (x, mask), chunks=4)
    seen = {told for told in TOLD if told[0] == 3}  # others are runs on the meta device
    assert seen == {(3, 10, (False, training, True), False) for training in (True, False)}
    TOLD.clear()
    costs([Masked().eval()], (x, mask), chunks=4, training=True)
    assert any(how == (False, True, True) for samples, _, how, _ in TOLD if samples == 3)


counts = {"calls": 0}


class CountsGlobally(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        counts["calls"] += 1
        return super().forward(input)


def test_measuring_leaves_no_trace_in_globals() -> None:
    costs([CountsGlobally(WIDTH, WIDTH)])
    assert counts == {"calls": 0}


class Traces(nn.Module):
    """Leaves traces in every way that a layer can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.ReLU(inplace=True)
        )
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.nested = 0, {"log": [[0]]}
        self.generator = torch.Generator().manual_seed(1)
        self.table = torch.arange(float(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.nested["log"][0].append(len(x))
        self.last = x
        self.seen += 1
        self.table += 1
        random.random()
        numpy.random.rand()
        torch.rand(1, generator=self.generator)
        return self.inner(x.add_(torch.rand(1))) + self.table


def test_measuring_leaves_no_trace() -> None:
    layer, lock = Traces(), threading.Lock()  # which nobody can copy
    layer.register_forward_hook(lambda *_: tell(lock))
    layer.inner[0].register_full_backward_hook(lambda *_: tell(lock))
    layer.inner[0].weight.register_hook(lambda *_: tell(lock))
    layer.inner[0].bias.requires_grad_(False)
    layer.inner[0].weight.grad = torch.ones(WIDTH, WIDTH)
    layer.inner[1].eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    own = {name: id(p) for name, p in layer.named_parameters()}
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    sample = torch.ones(10, WIDTH)
    costs([layer, layer], sample)
    assert (TOLD, layer.calls, layer.nested) == ([], 0, {"log": [[0]]})
    assert not hasattr(layer, "last")
    assert layer.table.tolist() == list(range(WIDTH))
    assert [m.training for m in layer.inner.modules()] == [True, True, False, True, True]
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert {name: id(p) for name, p in layer.named_parameters()} == own
    assert not layer.inner[0].bias.requires_grad
    assert torch.equal(layer.inner[0].weight.grad, torch.ones(WIDTH, WIDTH))
    assert [p.grad for p in layer.parameters()][1:] == [None, None, None]
    assert torch.equal(sample, torch.ones(10, WIDTH))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert numpy.random.get_state()[1].tolist() == generators[2]
    fresh = torch.Generator().manual_seed(1)
    assert torch.equal(layer.generator.get_state(), fresh.get_state())
    layer(torch.ones(10, WIDTH, requires_grad=True) * 1).sum().backward()
    assert [lock] * 3 == TOLD


def synchronized() -> nn.Module:
    """A norm that would talk to a group, which nobody can copy."""
    norm: Any = nn.SyncBatchNorm(WIDTH)
    norm.process_group = threading.Lock()
    return norm


@pytest.mark.parametrize(
    "build",
    [
        synchronized,
        lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_that_are_special_are_measured(build: Callable[[], nn.Module]) -> None:
    layer = build()
    assert costs([layer, layer.eval()][:1])[0] > 0


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.lock = threading.Lock()


class Once(nn.Linear):
    """Goes on from what it returned before, whose graph is gone."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x + getattr(self, "kept", 0))
        return self.kept


@pytest.mark.parametrize("kind", [Locked, lambda: Once(WIDTH, WIDTH)])
def test_layers_that_cannot_be_measured_are_balanced_by_operations(kind: Any) -> None:
    layers, warnings = [kind(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))], []
    settings = Settings(2, 2, None, "time", "never", deferred_batch_norm=True)
    sample = torch.ones(4, WIDTH)
    measure = partial(layer_times, layers, run_layer, sample, 1, CPU, trains=True, training=False)
    balancing = Balancing(layers, run_layer, sample, measure, warnings.append)
    partition = balancing.partition(2, settings)
    assert (partition.sizes, partition.unit) == ((2, 2), "flops")
    (text,) = warnings
    assert f"can't be timed, because {type(layers[0]).__name__} can't run by itself" in text
    assert "balance='flops'" in text
    with pytest.raises(UntimableLayer, match="input can't be split"):
        costs(layers, torch.ones(0, WIDTH))


class Misleading(models.Module):
    """All layers have as many operations, but one takes longer than all others."""

    def build(self) -> None:
        self.backbone = nn.Sequential(*(SleepingLayer(WIDTH, u) for u in (0.03, 1e-3, 1e-3, 1e-3)))


def chosen(arguments: dict[str, Any]) -> Any:
    strategy = GPipeStrategy(2, **arguments)
    train(Misleading(), devices=2, max_steps=1, strategy=strategy)
    return strategy.partition.sizes, strategy.partition.unit


def test_the_cut_goes_by_time() -> None:
    assert run_ranks(chosen, 2, {}) == [((2, 2), "flops")] * 2
    for step in ("mini-batch", "micro-batch"):
        found = run_ranks(chosen, 2, {"balance": "time", "step": step})
        assert found == [((1, 3), "time")] * 2


class Mixed(L.LightningModule):
    """Validates first; its first layer tells how it runs."""

    class Told(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                mode = self.training, torch.is_autocast_enabled(DEVICE), torch.is_grad_enabled()
                tell((*mode, torch.get_autocast_dtype(DEVICE), len(x)))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.Told(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.backbone(batch).float().square().mean()

    validation_step = training_step

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, WIDTH), batch_size=8)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def shown(step: Any, sanity: int) -> list[Any]:
    strategy = GPipeStrategy(4, balance="time", step=step)
    how = {"precision": "bf16-mixed", "num_sanity_val_steps": sanity}
    train(Mixed(), devices=2, strategy=strategy, max_steps=1, **how)
    return TOLD[:5]


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("sanity", [0, 1])
def test_layers_run_as_in_training(step: Any, sanity: int) -> None:
    """Under the Trainer's autocast, even if a validation comes first."""
    first, _ = run_ranks(shown, 2, step, sanity)  # rank 0 measures
    assert first == [(True, True, True, torch.bfloat16, 2)] * 5


def partition_of(stages: int, balance: Any, measure: Any, warn: Any) -> Partition:
    layers = [nn.Linear(4, 4), Reads()]
    balancing = Balancing(layers, run_layer, torch.ones(2, 4), measure, warn)
    return balancing.partition(stages, Settings(4, stages, None, balance, "always", True))


@pytest.mark.parametrize("balance", ["flops", "time"])
def test_one_stage_has_no_need_of_costs(balance: str) -> None:
    found = partition_of(1, balance, partial(pytest.fail, "it was measured"), pytest.fail)
    assert (found.sizes, found.unit) == ((2,), "params")


def test_layers_that_need_values_are_balanced_by_parameters() -> None:
    told: list[str] = []
    assert partition_of(2, "flops", None, told.append).unit == "params"
    assert len(told) == 1
    assert "their operations can't be counted" in told[0]


class Validating(ConvNet):
    """Dropout and batch norm; the cut may come in a validation, in inference mode."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head(self.backbone(batch[0]))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def weights(balance: Any, sanity: int) -> Any:
    L.seed_everything(3, verbose=False)
    module, strategy = Validating(), GPipeStrategy(4, balance=balance)
    state = train(module, max_epochs=2, devices=2, strategy=strategy, num_sanity_val_steps=sanity)
    return state, strategy.partition.sizes


@pytest.mark.parametrize("sanity", [0, 2])
def test_weights_are_those_of_the_same_list_bit_for_bit(sanity: int) -> None:
    timed, sizes = run_ranks(weights, 2, "time", sanity)[0]
    listed, _ = run_ranks(weights, 2, [*sizes], sanity)[0]
    assert timed.keys() == listed.keys()
    assert [name for name in listed if not torch.equal(timed[name], listed[name])] == []


def test_blocks_are_measured_as_their_loop_calls_them() -> None:
    timed, *_ = run_ranks(pipelined, 2, "Encoder", 2, "time")[0]
    expected, *_ = run_ranks(pipelined, 2, "Encoder", 2, "params")[0]
    torch.testing.assert_close(timed, expected, rtol=0, atol=0)
