"""What stands beside the batch is split if it has an entry a sample, and never by a guess."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import Blocks, GPipeStrategy
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.per_sample import PerSample
from lightning_gpipe.tensors.microbatch import Split
from lightning_gpipe.tensors.tree import Tree
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train

N = 6  # samples, and positions, and channels


class Layer(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(*value)


def whole(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[int]:
    batch = Tree.of(tuple(torch.zeros(shape) for shape in shapes), "The input")
    return sorted(PerSample([Layer(function)], 2, nullcontext).whole(batch, run_layer))


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, target: (x, target), [(N, N), (N, N)], []),
        (lambda x, target: x - target, [(N, N), (N, N)], []),
        (lambda x, target: nn.functional.mse_loss(x, target), [(N, 3), (N, 3)], []),
        (lambda x, padding: x * padding[:, :, None], [(N, N, 4), (N, N)], []),
        (lambda x, scale: x * scale[:, None], [(N, 4), (N,)], []),
        (lambda x, other: (x * 2, other * 3), [(N, N), (N, N)], []),
        (lambda x, table: x + table, [(N, N, 4), (N, 4)], [1]),
        (lambda x, cos, sin: x * cos + x * sin, [(N, N, 4), (N, 4), (N, 4)], [1, 2]),
        (lambda x, mask: mask @ x, [(N, N, 4), (N, N)], [1]),
        (lambda x, weight: x @ weight, [(N, N), (N, N)], [1]),
        (lambda x, others: x @ others.T, [(N, 4), (N, 4)], [1]),
        (
            lambda x, table, padding: (x + table) * padding[:, :, None],
            [(N, N, 4), (N, 4), (N, N)],
            [1],
        ),
        (lambda x, pad, once: x * pad[:, :, None] + once, [(N, N, 4), (N, N), (1, N, 4)], []),
    ],
)
def test_the_layers_tell_what_is_split(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: list[int]
) -> None:
    assert whole(function, *shapes) == expected


RUNS = itertools.count()


class Counted(nn.Module):
    """Hands a mask on, and gives a scalar: a sum of the batch, or a number of layers."""

    def __init__(self, is_of_batch: bool) -> None:
        super().__init__()
        self.linear, self.is_of_batch = nn.Linear(4, 4), is_of_batch

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, scalar = value
        next(RUNS)
        x = self.linear(x) + mask
        return x, mask, scalar + (x.sum() if self.is_of_batch else 1)


@pytest.mark.parametrize("is_of_batch", [True, False])
def test_of_layers_that_do_the_same_few_run(is_of_batch: bool) -> None:
    """Where a layer hasn't run, it is known all the same what comes of the batch."""
    batch = Tree.of((torch.zeros(N, N, 4), torch.zeros(N, 4), torch.zeros(())), "The input")
    split, runs = Split.plan(batch, 2, {1}), []
    for count in (4, 30):
        before = next(RUNS)
        per_sample = PerSample([Counted(is_of_batch) for _ in range(count)], 2, nullcontext)
        assert per_sample.whole(batch, run_layer) == {1}
        outline = per_sample.outline(batch, run_layer, split)
        assert outline is not None
        assert [t.shape[1:] for t in outline.outputs[0].tensors()] == [(N, 4), (4,), ()]
        assert outline.alike == (False, True, not is_of_batch)
        runs.append(next(RUNS) - before - 1)
    others = 0 if is_of_batch else 2 * 26  # what may come out otherwise in each layer is followed
    assert 0 < runs[0] == runs[1] - others


class Hidden:
    """What can't be sent to another stage."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_layers_of_a_stage_may_hand_anything_on() -> None:
    layers = [Layer(lambda x, _: Hidden(x * 2)), Takes(), Layer(lambda x, y: (x, y))]
    batch = Tree.of((torch.zeros(N, 4), torch.zeros(N, 4)), "The input")
    per_sample = PerSample(layers, 2, nullcontext)
    assert per_sample.whole(batch, run_layer) == set()
    assert per_sample.outline(batch, run_layer, Split.plan(batch, 2)) is not None


class Takes(nn.Module):
    def forward(self, value: Hidden) -> tuple[Tensor, Tensor]:
        return value.x + 1, value.x


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, weights: x * weights.mean(), [(N, 4), (N,)]),
        (lambda x, memory: (x @ memory.T).softmax(-1) @ memory, [(N, 3, 4), (N, 4)]),
        (lambda x, values: x * values.sum().item(), [(N, N), (N,)]),
    ],
)
def test_what_the_layers_take_both_ways_is_refused(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(ValueError, match=r"don't tell .* give it a first dimension of 1: \[1, 6"):
        whole(function, *shapes)


def test_a_layer_that_needs_values_is_no_hindrance_where_no_dimension_is_the_batch() -> None:
    assert whole(lambda x, target: x * x.sum().item(), (N, 4), (N,)) == []


def test_what_was_longer_than_a_batch_is_never_split() -> None:
    """A table of 6 entries beside batches of 8, of which the last has 6 samples."""
    remembered = PerSample([Layer(lambda x, table: x * table.sum())], 2, nullcontext)
    for samples in (8, 6):
        batch = Tree.of((torch.zeros(samples, 4), torch.zeros(6)), "The input")
        assert remembered.whole(batch, run_layer) == ({1} if samples == 6 else set())


@pytest.mark.parametrize(
    ("layer", "shape", "problem"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8), (6, 3, 4), "takes dimension 0 .* for time"),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (6, 4), "for time"),
        (nn.LSTM(4, 4), (6, 3, 4), r"Layer 0 \(LSTM\) .* build the layer with batch_first=True"),
        (nn.Linear(4, 4), (4,), r"dimension 0, but none of 2. .*x.unsqueeze\(0\) for a single"),
        (nn.Unflatten(0, (3, 2)), (6, 4), "any number of samples"),
    ],
)
def test_an_input_without_a_batch_dimension_is_told_that_dimension_0_is_cut(
    layer: nn.Module, shape: tuple[int, ...], problem: str
) -> None:
    batch = Tree.of(torch.zeros(shape), "The input")
    with pytest.raises(ValueError, match=problem):
        PerSample([layer], 2, nullcontext).whole(batch, run_layer)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (6, 3, 4)),
        (nn.LSTM(4, 4, batch_first=True), (6, 3, 4)),
        (nn.Linear(4, 4), (6, 4)),
        (nn.BatchNorm1d(4), (2, 4)),
    ],
)
def test_inputs_with_a_batch_dimension_are_cut(layer: nn.Module, shape: tuple[int, ...]) -> None:
    batch = Tree.of(torch.zeros(shape), "The input")
    assert PerSample([layer], 2, nullcontext).whole(batch, run_layer) == frozenset()


class Block(nn.Module):
    """Attends with a mask for all samples, positions for all, and padding for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, h: Tensor, mask: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        scores = (h @ h.mT).masked_fill(~mask, -9.0).masked_fill(~padding[:, None], -9.0)
        return h + self.linear(scores.softmax(-1) @ (h + positions)).tanh()


class Decoder(models.Module):
    """As many positions as samples."""

    samples = N

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length = N
        h = x[:, None] * torch.arange(1, length + 1, dtype=x.dtype)[:, None]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        positions = torch.arange(length * models.WIDTH, dtype=x.dtype).view(length, -1) / 36
        for block in self.blocks:
            h = block(h, mask, positions, x > -0.3)
        return h.mean(1)


class Mean(nn.Module):
    """Takes the mean of a weight per sample, or of one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, value: Any) -> Any:
        x, weights = value
        return self.linear(x) * weights.mean(), weights


class Weighted(models.Module):
    def build(self) -> None:
        self.backbone = nn.Sequential(Mean(), Mean())

    def forward(self, x: Tensor) -> Any:
        return self.backbone((x, x[:, 0]))[0]


def trained(kind: str, stages: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    module = globals()[kind]()
    if hasattr(module, "blocks"):
        module.blocks = Blocks(module.blocks)
    return train(module, max_steps=3, devices=stages, strategy=GPipeStrategy(3))


@pytest.mark.parametrize("stages", [1, 2])
def test_masks_and_tables_as_long_as_the_batch_train_as_before(stages: int) -> None:
    torch.manual_seed(2)
    plain = train(Decoder(), max_steps=3)
    found = run_ranks(trained, stages, "Decoder", stages)[0]
    torch.testing.assert_close(found, plain, atol=1e-10, rtol=0)


def test_what_cannot_be_told_stops_the_run_before_a_step() -> None:
    with pytest.raises(RankError, match="as long as the batch of 8 samples"):
        run_ranks(trained, 2, "Weighted", 2)


def test_why_the_layers_do_not_tell_is_told() -> None:
    """A layer makes a tensor on the host, whatever its input's device."""

    def layer(x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.arange(N, dtype=x.dtype, device="cpu") * mask.sum()

    with pytest.raises(ValueError, match=r"They were run without data: .* on the meta device"):
        whole(layer, (N, N), (N, N))
