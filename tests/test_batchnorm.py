"""Running statistics of batch norm are those of the mini-batch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.engine.batchnorm import DeferredBatchNorm
from tests.ranks import run_ranks
from tests.training import train


class Normalised(L.LightningModule):
    """Batch norm first in the backbone, and again behind a convolution."""

    def __init__(self, data: Tensor, batch_size: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size
        self.backbone = nn.Sequential(
            nn.BatchNorm2d(3, momentum=momentum),
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
        ).to(data.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(batch[0]).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.data), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pipeline_state(
    module: Normalised, stages: int, chunks: int, mode: str, deferred: bool = True
) -> dict[str, Tensor]:
    strategy = GPipeStrategy(chunks, checkpoint=mode, deferred_batch_norm=deferred)  # type: ignore[arg-type]
    return train(copy.deepcopy(module), max_epochs=1, devices=stages, strategy=strategy)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("deferred", [True, False])
def test_one_micro_batch_equals_a_plain_trainer(mode: str, deferred: bool) -> None:
    torch.manual_seed(0)
    module = Normalised(torch.randn(24, 3, 6, 6, dtype=torch.float64), 8)
    expected = train(copy.deepcopy(module), max_epochs=1, devices=1)
    for stages in (1, 2):
        state = run_ranks(pipeline_state, stages, module, stages, 1, mode, deferred)[0]
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    [
        (torch.float64, 0.0, {"rtol": 0, "atol": 1e-10}),
        (torch.float32, 1000.0, {"rtol": 1e-5, "atol": 0}),
    ],
)
def test_running_statistics_are_the_mini_batchs(
    dtype: torch.dtype, mean: float, tolerance: dict[str, float], momentum: float | None
) -> None:
    torch.manual_seed(0)
    data = (
        torch.randn(3 * 34, 3, 32, 32, dtype=dtype) + mean
    )  # 34 samples in 4 micro-batches: 9, 9, 8, 8
    module = Normalised(data, 34, momentum)
    reference = nn.BatchNorm2d(3, momentum=momentum).double()
    for batch in data.double().split(34):
        reference(batch)
    for stages, mode in ((1, "always"), (2, "except_last")):
        state = run_ranks(pipeline_state, stages, module, stages, 4, mode)[0]
        for name, expected in reference.named_buffers():
            torch.testing.assert_close(
                state[f"backbone.0.{name}"].to(expected.dtype), expected, **tolerance
            )


def test_not_deferred_statistics_move_with_every_micro_batch() -> None:
    torch.manual_seed(0)
    module = Normalised(torch.randn(8, 3, 6, 6, dtype=torch.float64), 8)
    state = run_ranks(pipeline_state, 1, module, 1, 4, "always", False)[0]
    assert state["backbone.0.num_batches_tracked"] == 4
    reference = nn.BatchNorm2d(3).double()
    for part in module.data.split(2):
        reference(part)
    torch.testing.assert_close(
        state["backbone.0.running_var"], reference.running_var, rtol=0, atol=1e-12
    )


def test_a_layer_used_twice_moves_twice() -> None:
    torch.manual_seed(0)
    layer, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first, second = torch.randn(2, 8, 3)
    deferred = DeferredBatchNorm([layer], deferred=True)
    deferred.begin([4, 4])
    for m in range(2):
        with deferred.micro_batch(recompute=False):
            layer(first[4 * m : 4 * m + 4])
            layer(second[4 * m : 4 * m + 4])
    deferred.finish()
    reference(first)
    reference(second)
    torch.testing.assert_close(layer.state_dict(), reference.state_dict())
    deferred.remove()
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_norm_moves_once(momentum: float | None) -> None:
    torch.manual_seed(0)
    layer = nn.InstanceNorm1d(3, momentum=momentum, track_running_stats=True).double()  # type: ignore[arg-type]
    reference = copy.deepcopy(layer)
    samples = torch.randn(7, 3, 5, dtype=torch.float64)
    deferred = DeferredBatchNorm([layer], deferred=True)
    deferred.begin([3, 3, 1])
    outputs = []
    for part in samples.split([3, 3, 1]):
        with deferred.micro_batch(recompute=False):
            outputs.append(layer(input=part))  # by name, too
    deferred.finish()
    torch.testing.assert_close(torch.cat(outputs), reference(samples), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)


class Checkpointed(nn.Module):
    """Runs its layers again in the backward."""

    def __init__(self, reentrant: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(*layers), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class CheckpointedModule(Normalised):
    """Batch norm inside torch.utils.checkpoint."""

    def __init__(self, data: Tensor, batch_size: int, reentrant: bool) -> None:
        super().__init__(data, batch_size)
        self.lift = nn.Parameter(torch.zeros((), dtype=data.dtype), requires_grad=True)
        first, *others = self.backbone
        self.backbone = nn.Sequential(
            Checkpointed(reentrant, first), Checkpointed(reentrant, *others), nn.Linear(64, 1)
        ).to(data.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0 * self.lift  # else the reentrant kind gives no gradient
        return self.backbone(x).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"step": "micro-batch"}, {"checkpoint": "never"}])
def test_layers_that_run_again_in_the_backward_move_once_more_a_mini_batch(
    reentrant: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    module = CheckpointedModule(torch.randn(24, 3, 6, 6, dtype=torch.float64), 8, reentrant)
    expected = train(copy.deepcopy(module), max_epochs=1, devices=1)
    one = train(copy.deepcopy(module), max_epochs=1, strategy=GPipeStrategy(1, **options))
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
    first, second = (
        run_ranks(checkpointed_state, stages, module, stages, options)[0] for stages in (1, 2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    reference = nn.BatchNorm2d(3).double()
    for batch in module.data.split(8):
        reference(batch)
        reference(batch)
    for name, value in reference.named_buffers():
        key = f"backbone.0.layers.0.{name}"
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-12)


def checkpointed_state(
    module: Normalised, stages: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    strategy = GPipeStrategy(4, **options)
    return train(copy.deepcopy(module), max_epochs=1, devices=stages, strategy=strategy)


def test_copies_are_left_alone() -> None:
    """Averages and teachers are copies, made though process groups can't be copied."""
    layer = nn.BatchNorm1d(3)
    deferred = DeferredBatchNorm([layer], deferred=True, across=threading.Lock())  # type: ignore[arg-type]
    copied = copy.deepcopy(layer)
    with deferred.micro_batch(recompute=False):
        copied(torch.randn(4, 3))
    assert copied.num_batches_tracked == 1
    assert copied.momentum == layer.momentum == 0.1
    deferred.finish()
    assert layer.num_batches_tracked == 0


class MovesFirst(nn.BatchNorm1d):
    """Moves its statistics by itself, before it normalises."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(input.mean(0), alpha=0.1)  # type: ignore[union-attr]
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, training=True)


@pytest.mark.parametrize("recompute", [True, False])
def test_micro_batches_do_not_share_what_their_backwards_need(recompute: bool) -> None:
    deferred = DeferredBatchNorm([layer := MovesFirst(3)], deferred=True)
    deferred.begin([4] * 20)
    outputs = []
    for part in torch.randn(20, 4, 3, requires_grad=True):
        with deferred.micro_batch(recompute):
            outputs.append(layer(part))
    torch.stack(outputs).square().sum().backward()


def test_a_recompute_moves_nothing() -> None:
    layer = nn.BatchNorm1d(3)
    before = copy.deepcopy(layer.state_dict())
    deferred = DeferredBatchNorm([layer], deferred=True)
    with deferred.micro_batch(recompute=True):
        layer(torch.randn(4, 3))
    deferred.finish()
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_a_layer_that_does_not_track_stays_as_it_is() -> None:
    """Fine-tuning callbacks switch tracking off to freeze a layer, and leave its statistics."""
    layer = nn.BatchNorm1d(3)
    layer.track_running_stats = False
    before = copy.deepcopy(layer.state_dict())
    deferred = DeferredBatchNorm([layer], deferred=True)
    with deferred.micro_batch(recompute=False):
        layer(torch.randn(4, 3))
    deferred.finish()
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_one_value_per_channel_is_refused_with_the_remedy() -> None:
    deferred = DeferredBatchNorm([layer := nn.BatchNorm1d(3)], deferred=True)
    with deferred.micro_batch(recompute=False), pytest.raises(ValueError, match="lower `chunks`"):
        layer(torch.randn(1, 3))


class Assigning(nn.BatchNorm1d):
    """Puts other tensors in the places of its statistics."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = 0.1 if self.momentum is None else self.momentum
        self.running_mean = (1 - momentum) * self.running_mean + momentum * input.mean(0)
        self.running_var = (1 - momentum) * self.running_var + momentum * input.var(0)
        return input - input.mean(0)


def test_a_layer_may_assign_its_statistics() -> None:
    torch.manual_seed(0)
    layer, reference = Assigning(3), nn.BatchNorm1d(3)
    deferred = DeferredBatchNorm([layer], deferred=True)
    for _ in range(2):
        first, second = torch.randn(2, 8, 3)
        deferred.begin([4, 4])
        for m in range(2):
            with deferred.micro_batch(recompute=False):
                layer(first[4 * m : 4 * m + 4])
                layer(second[4 * m : 4 * m + 4])
            with deferred.micro_batch(recompute=True):
                layer(first[4 * m : 4 * m + 4])
        deferred.finish()
        reference(first)
        reference(second)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(layer, name), getattr(reference, name))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_bits_are_the_same_whatever_layers_a_stage_has(momentum: float | None) -> None:
    torch.manual_seed(0)
    widths = [7, 1, 33, 64, 5]
    parts = [[torch.randn(3, width) for _ in range(21)] for width in widths]

    def moved(start: int, end: int) -> list[Tensor]:
        layers = [nn.BatchNorm1d(width, momentum=momentum) for width in widths[start:end]]
        deferred = DeferredBatchNorm(layers, deferred=True)
        for _ in range(2):
            deferred.begin([3] * 21)
            for m in range(21):
                with deferred.micro_batch(recompute=False):
                    for layer, values in zip(layers, parts[start:end], strict=True):
                        layer(values[m])
            deferred.finish()
        return [buffer for layer in layers for buffer in layer.buffers()]

    together, alone = moved(0, 5), [*moved(0, 2), *moved(2, 3), *moved(3, 5)]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_layers_are_compiled_once_for_all_micro_batches() -> None:
    """Else behind Dynamo's limit they would run as if they weren't compiled."""
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    deferred = DeferredBatchNorm([layers[1]], deferred=True)
    run = torch.compile(layers, backend=backend)
    found = []
    for count in (2, 12):
        deferred.begin([4] * count)
        for part in torch.randn(count, 4, 3):
            with torch.no_grad(), deferred.micro_batch(recompute=False):
                run(part)
        deferred.finish()
        found.append(len(compiled))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_momentum_that_is_a_tensor_of_the_layer_is_refused(kind: str) -> None:
    layer = nn.BatchNorm1d(3)
    del layer.momentum
    if kind == "buffer":
        layer.register_buffer("momentum", torch.tensor(0.1))
    else:
        layer.momentum = nn.Parameter(torch.tensor(0.1))  # type: ignore[assignment]
    deferred = DeferredBatchNorm([layer], deferred=True)
    deferred.begin([4])
    with pytest.raises(TypeError, match="momentum"), deferred.micro_batch(recompute=False):
        layer(torch.randn(4, 3))
