"""Batch norm over replicas.

PyTorch has kernels for it on GPUs alone. Here it is computed with ordinary operations, in the
process group that the layer was given: all but the kernels is what runs on GPUs.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import trainer


def synchronized_forward(self: Any, x: Tensor) -> Tensor:
    """What SyncBatchNorm computes."""
    if not self.training:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
    group = self.process_group or dist.group.WORLD
    count = all_reduce(x.new_tensor([float(len(x))]), group=group)
    mean = all_reduce(x.sum(0), group=group) / count
    variance = all_reduce((x - mean).square().sum(0), group=group) / count
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        for buffer, value in (
            (self.running_mean, mean),
            (self.running_var, variance * count / (count - 1)),
        ):
            buffer.mul_(1 - self.momentum).add_(value, alpha=self.momentum)
    return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Normalised(models.Module):
    """Batch norm in every stage, and outside the backbone."""

    samples = 6

    def build(self) -> None:
        self.before = nn.BatchNorm1d(models.WIDTH)
        self.backbone = nn.Sequential(
            *(
                layer
                for _ in range(3)
                for layer in (
                    nn.Linear(models.WIDTH, models.WIDTH),
                    nn.BatchNorm1d(models.WIDTH),
                    nn.Tanh(),
                )
            )
        )

    def forward(self, x: Tensor) -> Any:
        return self.backbone(self.before(x))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(2, 48, models.WIDTH, generator=generator, dtype=torch.float64)
        if isinstance(self.trainer.strategy, GPipeStrategy):  # 12 samples a step on all replicas
            own = slice(self.trainer.distributed_sampler_kwargs["rank"], None, 2)
            return DataLoader(TensorDataset(x[own], y[own]), batch_size=6)
        return DataLoader(TensorDataset(x, y), batch_size=12)


class Odd(Normalised):
    """Replica 0 has fewer samples in its last batch."""

    def train_dataloader(self) -> Any:
        replica = self.trainer.distributed_sampler_kwargs["rank"]
        x = torch.randn(7 + 5 * replica, models.WIDTH, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x), batch_size=6)


class NewLook(Normalised):
    """Replica 0 has micro-batches of another shape in its last step."""

    def train_dataloader(self) -> Any:
        replica = self.trainer.distributed_sampler_kwargs["rank"]
        generator = torch.Generator().manual_seed(7 + replica)
        x = torch.randn(18, models.WIDTH, generator=generator, dtype=torch.float64)
        x = x[: 18 - 2 * (replica == 0)]
        return DataLoader(TensorDataset(x, x.flip(0)), batch_size=6)


class Synchronizing(GPipeStrategy):
    """Takes the layers above for kernels."""

    without_sync = frozenset()


def fit(kind: str, stages: int, chunks: int, checkpoint: Any, steps: int = 4, **gpipe: Any) -> Any:
    """Train with two replicas; with no stages plainly, on the samples of both."""
    forward = nn.SyncBatchNorm.forward
    setattr(nn.SyncBatchNorm, forward.__name__, synchronized_forward)
    try:
        L.seed_everything(3, verbose=False)
        module = globals()[kind]("sgd")  # AdamW enlarges the rounding of a zero gradient
        options: dict[str, Any] = {"devices": 1}
        if stages:
            strategy = Synchronizing(chunks, stages=stages, checkpoint=checkpoint, **gpipe)
            options = {"devices": 2 * stages, "strategy": strategy, "sync_batchnorm": True}
        run = trainer(max_steps=steps, max_epochs=1, use_distributed_sampler=False, **options)
        run.fit(module)
        assert not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules())
        return module.state_dict()
    finally:
        setattr(nn.SyncBatchNorm, forward.__name__, forward)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("stages", [1, 2])
def test_one_micro_batch_as_all_samples_together(stages: int, checkpoint: str) -> None:
    plain = fit("Normalised", 0, 1, checkpoint)
    found = run_ranks(fit, 2 * stages, "Normalised", stages, 1, checkpoint)[0]
    torch.testing.assert_close(found, plain, atol=1e-10, rtol=0)


def test_several_micro_batches() -> None:
    one, two = (run_ranks(fit, 2 * k, "Normalised", k, 4, "always")[0] for k in (1, 2))
    torch.testing.assert_close(two, one, atol=1e-10, rtol=0)


def test_statistics_are_of_the_mini_batch_of_all_replicas() -> None:
    """Exactly so for a layer whose input doesn't depend on micro-batches."""
    plain = fit("Normalised", 0, 1, "always", 1)
    found = run_ranks(fit, 2, "Normalised", 1, 4, "always", 1)[0]
    for layer in ("before", "backbone.1"):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            key = f"{layer}.{name}"
            torch.testing.assert_close(found[key], plain[key], atol=1e-12, rtol=0)


def test_different_numbers_of_micro_batches() -> None:
    with pytest.raises(RankError, match=r"Replicas have \[1, 6\] micro-batches"):
        run_ranks(fit, 2, "Odd", 1, 6, "always")


def fit_new_look(stages: int, virtual: int, micro: bool) -> Any:
    step = "micro-batch" if micro else "mini-batch"
    return fit("NewLook", stages, 2, "never", step=step, virtual_stages=virtual)


@pytest.mark.parametrize("micro", [True, False])
def test_a_shape_that_is_new_on_one_replica(micro: bool) -> None:
    """Replicas run the stages of a rank in the same order, though one of them has to wait."""
    one = run_ranks(fit_new_look, 2, 1, 1, micro)[0]
    two = run_ranks(fit_new_look, 4, 2, 2, micro)[0]
    torch.testing.assert_close(two, one, atol=1e-10, rtol=0)


def fit_plainly(stages: int, devices: int) -> None:
    module = Normalised()
    module.backbone[1] = nn.SyncBatchNorm(models.WIDTH)
    strategy = GPipeStrategy(2, stages=stages)
    trainer(devices=devices, strategy=strategy, max_steps=1).fit(module)


def test_not_on_cpus() -> None:
    with pytest.raises(RankError, match="needs GPUs"):
        run_ranks(fit_plainly, 2, 1, 2)
