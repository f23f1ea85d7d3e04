"""A backward in two halves: the input's gradient, then those of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.engine.micro_batch import MicroBatch
from lightning_gpipe.engine.split import SplitBackward
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.models import WIDTH
from tests.ranks import run_ranks
from tests.training import trainer


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Written(nn.Module):
    """Has a node that is written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(x, self.weight)  # type: ignore[no-any-return]


class Aside(nn.Module):
    """One output doesn't depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.bias * 2


class First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A weight that is computed of two parameters, and one that is used beside the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.gate = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.sigmoid(self.gate.exp() + self.gate)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


CASES: dict[str, tuple[Any, Sequence[int], bool]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), (4, 6), True),
    "three dimensions": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), (4, 3, 6), True),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0),
        (4, 3, 6),
        True,
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        (4, 3, 7, 7),
        True,
    ),
    "lstm": (lambda: First(nn.LSTM(6, 6, 2, batch_first=True)), (4, 3, 6), True),
    "no weights": (nn.Tanh, (4, 6), True),
    "frozen": (lambda: nn.Linear(6, 6).requires_grad_(False), (4, 6), True),
    "computed weight": (Normed, (4, 6), True),
    "a weight used twice": (tied, (4, 6), False),
    "a node in Python": (lambda: nn.Sequential(nn.Linear(6, 6), Written()), (4, 6), False),
    "an output beside": (Aside, (4, 6), False),
}


def gradients(module: nn.Module, x: Tensor, splits: bool) -> list[Tensor | None]:
    """The input's gradient, then those of the weights."""
    module.zero_grad()
    record, handed_on = MicroBatch([True]), list[Any]()
    given = record.enter(Tree.of(x, "The input"))
    outputs = Tree.of(module(given.value()), "The output")
    record.end_forward(given, outputs, keeps_graph=True)
    tops = [torch.cos(t.detach()) for t in outputs.tensors()]
    weights = [p for p in module.parameters() if p.requires_grad]
    if not splits:
        record.backward(tops, False, handed_on.extend, None)
    else:
        record.backward_input(tops, handed_on.extend, weights)
        assert len(handed_on) == 1
        assert all(p.grad is None for p in weights), "the first half leaves weights alone"
        record.backward_weights()
    return [*handed_on, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("case", CASES)
def test_both_halves_give_what_the_whole_gives(case: str) -> None:
    torch.manual_seed(0)
    make, shape, can_split = CASES[case]
    module, x = make(), torch.randn(shape)
    whole, halves = (gradients(module, x, splits) for splits in (False, True))
    for a, b in zip(whole, halves, strict=True):
        assert (a is None and b is None) or (
            a is not None and b is not None and torch.equal(a, b)
        ), "bit for bit"
    record = MicroBatch([True])
    outputs = Tree.of(module(record.enter(Tree.of(x, "The input")).value()), "The output")
    nodes = [t.grad_fn for t in outputs.tensors() if t.grad_fn is not None]
    entry = record._entry
    assert entry is not None
    assert (SplitBackward.of(nodes, entry) is not None) == can_split


class Compiled(models.Module):
    """Layers whose graphs give memory away in their backward."""

    def build(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        self.backbone = nn.Sequential(*layers)
        for layer in layers:
            layer.compile(backend="aot_eager")


def compiled(stages: int) -> dict[str, Tensor]:
    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(4, step="micro-batch")}
    module = Compiled()
    trainer(max_epochs=1, **options).fit(module)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_train_with_halved_backwards() -> None:
    expected = compiled(0)
    for found in run_ranks(compiled, 2, 2):
        torch.testing.assert_close(found, expected)


def test_what_follows_of_nothing() -> None:
    """The loss doesn't reach the output: the stage before hears of it all the same."""
    record, handed_on = MicroBatch([True]), list[Any]()
    layer = nn.Linear(3, 3)
    given = record.enter(Tree.of(torch.randn(2, 3), "The input"))
    record.end_forward(given, Tree.of(layer(given.value()), "The output"), keeps_graph=True)
    record.backward_input([None], handed_on.extend, list(layer.parameters()))
    record.backward_weights()
    assert handed_on == [None]
    assert layer.weight.grad is None
