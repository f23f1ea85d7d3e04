"""Tensors that stand twice in what layers hand on, or share memory: as one tensor, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.test_whole_model import expected
from tests.training import train


class Twice(nn.Module):
    """Hands one tensor on in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


class HalfOfIt(Twice):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y[:, : WIDTH // 2]


class Halves(Twice):
    """Two views that don't overlap."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.linear(x).split(WIDTH // 2, dim=1)
        return first, second


class InPlace(nn.Module):
    """Changes the first of two tensors."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        first.mul_(2)
        return first, second


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([t.tanh() for t in pair], dim=1)[:, :WIDTH] + pair[1].sum(1, keepdim=True)


class Copies(Twice):
    """Two tensors of their own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.tanh(), y.sin()


class Add(nn.Module):
    """Gives both of its inputs one gradient, which is one tensor."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class OneGradient(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(Copies(), Add(), Copies(), Add())


class OneGradientOutside(models.Module):
    """The same before the backbone and behind it, in one micro-batch."""

    chunks = 1

    def build(self) -> None:
        self.before = Copies()
        self.backbone = nn.Sequential(Add(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Copies())

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.backbone(self.before(x))
        return first + second


class Same(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(Twice(), InPlace(), InPlace(), Sum())


class Input(models.Module):
    """The backbone's input stands in two places."""

    def build(self) -> None:
        self.before = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(InPlace(), InPlace(), Sum(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        h = self.before(x)
        return self.backbone((h, h))


class Output(models.Module):
    """The backbone's output does, and the step changes it."""

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Twice())

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.backbone(x)
        first.mul_(2)
        return first + second


class Overlapping(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(HalfOfIt(), InPlace(), Sum(), nn.Linear(WIDTH, WIDTH))


class OverlappingUnchanged(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(HalfOfIt(), Sum(), nn.Linear(WIDTH, WIDTH))


class OverlappingInValidation(OverlappingUnchanged):
    class Layer(InPlace):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return pair if self.training else super().forward(pair)

    def build(self) -> None:
        self.backbone = nn.Sequential(HalfOfIt(), self.Layer(), Sum(), nn.Linear(WIDTH, WIDTH))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)

    val_dataloader = models.Module.train_dataloader


def weights(kind: type[models.Module], state: Any) -> Any:
    module = kind("sgd")
    module.load_state_dict(state)
    devices = torch.distributed.get_world_size()
    layers = len(module.backbone) - devices + 1
    balance = [1] * (devices - 1) + [layers]  # cuts behind the first ones
    chunks = getattr(kind, "chunks", 3)
    strategy = GPipeStrategy(chunks, checkpoint="except_last", balance=balance)
    return train(module, max_steps=3, devices=devices, strategy=strategy)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", [Same, Input, Output, OverlappingUnchanged, OneGradient, OneGradientOutside]
)
def test_one_tensor_in_two_places(kind: type[models.Module], stages: int) -> None:
    state, plain = expected(kind, {"max_steps": 3})
    found = run_ranks(weights, stages, kind, state)[0]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [Overlapping, OverlappingInValidation])
def test_a_change_that_a_view_would_see_is_refused(kind: type[models.Module]) -> None:
    with pytest.raises(RankError, match=r"changed a tensor in place that shares memory.*a clone"):
        run_ranks(weights, 3, kind, kind("sgd").state_dict())


def test_what_overlaps_is_known() -> None:
    x = torch.zeros(4, 6)
    cases = {
        (): (x, torch.zeros(4), 3, None),
        (0, 1): (x, x[1:3]),
        (0, 2): (x[:2], x[2:], x[:1]),
        (1, 2): (torch.zeros(2), x, x.view(-1)),
    }
    for found, value in cases.items():
        assert Tree.of(value, "It").in_common == found
    tree = Tree.of((x, [x, 1], {"again": x}), "It")
    assert len(tree.tensors()) == 1
    first, (second, _), third = tree.value()
    assert first is second is third["again"] is x
