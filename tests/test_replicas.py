"""Replicas of the pipeline train as DistributedDataParallel does."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, SumMetric

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer

OPTIONS: dict[str, Any] = {
    "max_steps": 5,
    "accumulate_grad_batches": 3,
    "gradient_clip_val": 0.01,
    "devices": 2,
}
MODES = ("always", "except_last")  # with a recompute, and with and without one


class Odd(models.Module):
    """Sixty samples a replica, eight a batch: the last batch of an epoch has four."""


class Unused(models.Module):
    """A layer with a weight that no step uses, and one that some steps use."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.never = (
                nn.Linear(models.WIDTH, models.WIDTH) for _ in range(3)
            )
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(x) if float(x.detach().sum()) > 1e9 else self.first(x))

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.Block() for _ in range(4)))


class Moving(models.Around):
    """Buffers, also of whole numbers, that a hook moves by each replica's own batch."""

    moved_by_hooks = ("seen", "level")

    def build(self) -> None:
        super().build()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(models.WIDTH))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + self.level, y) * (1 + self.seen % 5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += int((batch[0] > 0).sum())
        self.level.lerp_(batch[0].mean(0), 0.1)


KINDS = {
    kind.__name__: kind
    for kind in (
        Odd,
        Unused,
        Moving,
        models.Around,
        models.Shared,
        models.Chained,
        models.TwoCalls,
        models.Frozen,
        models.Trees,
    )
}


class HookedDDP(DDPStrategy):
    """Lightning's registers communication hooks on GPUs only."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        hook, state, wrapper = self._ddp_comm_hook, self._ddp_comm_state, self._ddp_comm_wrapper
        if hook is not None and self.root_device.type == "cpu":
            self.model.register_comm_hook(state, wrapper(hook) if wrapper else hook)


def by_ddp(kind: str, state: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    module = KINDS[kind]()
    module.load_state_dict(state)
    strategy = HookedDDP(process_group_backend="gloo", **options)
    return train(module, **{**OPTIONS, "strategy": strategy})


def by_pipelines(
    kind: str, state: dict[str, Tensor], stages: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Train in every mode; returns the weights of rank 0, and of each rank what it holds."""
    results = {}
    for mode in MODES:
        module = KINDS[kind]()
        if dist.get_rank() == 0:  # all other ranks must get its weights
            module.load_state_dict(state)
        strategy = GPipeStrategy(3, stages=stages, checkpoint=mode, **options)
        devices = dist.get_world_size()
        results[mode] = train(module, **{**OPTIONS, "devices": devices, "strategy": strategy})
    return results


def initial(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return copy.deepcopy(KINDS[kind]().state_dict())


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_plain_ddps(kind: str, stages: int) -> None:
    state = initial(kind)
    options = {"find_unused_parameters": kind == "Unused"}
    expected = run_ranks(by_ddp, 2, kind, state, options)[0]
    moved = [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])]
    unmoved = [name for name in expected if name not in moved]
    frozen = ("before", "backbone.0", "backbone.2") if kind == "Frozen" else ("backbone",)
    assert not unmoved or kind in ("Unused", "Frozen")
    assert all(name.startswith(frozen) for name in unmoved)
    assert kind != "Unused" or len(unmoved) == 4 * 2 * 2, "not even weight decay moves them"
    ranks = run_ranks(by_pipelines, 2 * stages, kind, state, stages, {})
    for mode in MODES:
        for rank, results in enumerate(ranks):
            if rank >= stages:  # a hook has moved them since, as with DDP
                results[mode].update(
                    {name: expected[name] for name in getattr(KINDS[kind], "moved_by_hooks", ())}
                )
            torch.testing.assert_close(results[mode], expected, rtol=0, atol=1e-10)


def negate(group, bucket):  # type: ignore[no-untyped-def]  # no annotations as strings, torch says
    """A hook whose work shows, without rounding anything."""
    total = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return total.then(lambda future: future.value()[0] / -2)


HOOKS: dict[str, Any] = {
    "negate": lambda: {"ddp_comm_hook": negate},
    "fp16": lambda: {"ddp_comm_hook": fp16_compress_hook},
    "wrapped PowerSGD": lambda: {
        "ddp_comm_hook": powerSGD_hook,
        "ddp_comm_state": PowerSGDState(
            process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
        ),
        "ddp_comm_wrapper": fp16_compress_wrapper,
    },
    "small buckets": lambda: {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
}


def by_ddp_with_hook(hook: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return by_ddp("Odd", state, HOOKS[hook]())


def by_pipelines_with_hook(hook: str, state: dict[str, Tensor], stages: int) -> dict[str, Any]:
    return by_pipelines("Odd", state, stages, HOOKS[hook]())


@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks(hook: str) -> None:
    state = initial("Odd")
    plain = run_ranks(by_ddp, 2, "Odd", state, {})[0]
    expected = run_ranks(by_ddp_with_hook, 2, hook, state)[0]
    ranks = run_ranks(by_pipelines_with_hook, 4, hook, state, 2)
    # 16 bits flip where the sum over micro-batches rounds otherwise; PowerSGD cuts up whole buckets
    tolerance = {"fp16": 1e-5, "wrapped PowerSGD": 2e-3}.get(hook, 1e-10)
    for mode in MODES:
        torch.testing.assert_close(ranks[0][mode], expected, rtol=0, atol=tolerance)
        if hook == "negate":
            difference = (ranks[0][mode]["backbone.0.weight"] - plain["backbone.0.weight"]).abs()
            assert difference.max() > 1e-4, "the hook did its work"


def bits(stages: int, mode: str) -> dict[str, Tensor]:
    from tests.test_bits import ConvNet

    L.seed_everything(3, verbose=False)
    module = ConvNet().to(memory_format=torch.channels_last)
    return train(
        module,
        max_epochs=3,
        devices=2 * stages,
        strategy=GPipeStrategy(4, stages=stages, checkpoint=mode),  # type: ignore[arg-type]
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
    )


@pytest.mark.parametrize("mode", [*MODES, "never"])
def test_bits_do_not_depend_on_the_number_of_stages(mode: str) -> None:
    expected = run_ranks(bits, 2, 1, mode)[0]
    state = run_ranks(bits, 4, 2, mode)[0]
    different = [name for name, value in expected.items() if not torch.equal(value, state[name])]
    assert not different


class Reporting(models.Module):
    """Reports over replicas in every way that Lightning and torchmetrics have."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(models.WIDTH)
        self.total, self.mean = SumMetric(), MeanMetric()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.backbone(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.seen += [int(1000 * value) for value in x[:, 0]]
        loss = nn.functional.mse_loss(self(x), y)
        self.total(len(x))
        self.mean(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_sum", loss, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"total": self.total, "mean": self.mean})

    def on_validation_epoch_end(self) -> None:
        gathered = self.all_gather(torch.tensor(float(self.trainer.global_rank)))
        self.log("replicas", float(len(gathered)))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def report(stages: int) -> tuple[dict[str, Tensor], list[int], list[Tensor]]:
    torch.manual_seed(4)
    module = Reporting()
    world = dist.get_world_size()
    strategy: Any = GPipeStrategy(1, stages=stages) if stages else DDPStrategy()
    run = trainer(devices=world, strategy=strategy, max_epochs=2)
    run.fit(module)
    return dict(run.callback_metrics), module.seen, list(module.norm.buffers())


def test_reports_are_reduced_over_replicas() -> None:
    expected = run_ranks(report, 2, 0)
    ranks = run_ranks(report, 4, 2)
    for rank, (metrics, seen, buffers) in enumerate(ranks):
        torch.testing.assert_close(metrics, expected[rank // 2][0], rtol=1e-6, atol=1e-6)
        assert metrics["total"] == 120
        assert metrics["replicas"] == 2
        assert seen == expected[rank // 2][1], "a replica's stages see its share of the data"
        torch.testing.assert_close(buffers, expected[0][2], rtol=1e-6, atol=1e-6)


class OwnSampler(models.Module):
    def train_dataloader(self) -> Any:
        data = TensorDataset(*(torch.randn(40, models.WIDTH, dtype=torch.float64) for _ in "xy"))
        sampler = DistributedSampler(data, **self.shares())
        return DataLoader(data, batch_size=4, sampler=sampler)

    def shares(self) -> dict[str, int]:
        return {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}


class RightSampler(OwnSampler):
    def shares(self) -> dict[str, int]:
        return self.trainer.distributed_sampler_kwargs


class AskingSampler(OwnSampler):
    """Asks torch.distributed, whose collective calls go on seeing all processes."""

    def shares(self) -> dict[str, int]:
        ranks: list[Any] = [None] * dist.get_world_size(dist.group.WORLD)
        assert len(ranks) == dist.get_world_size() == self.trainer.strategy.replicas
        ranks = [None] * self.trainer.world_size
        dist.all_gather_object(ranks, self.trainer.global_rank)
        assert ranks == list(range(self.trainer.world_size))
        told = [ranks]
        dist.broadcast_object_list(told, src=self.trainer.world_size - 1)
        assert told == [ranks]
        return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}


def sample(kind: type[models.Module], stages: int) -> dict[str, Tensor]:
    world = dist.get_world_size()
    strategy = GPipeStrategy(2, stages=stages)
    torch.manual_seed(3)
    return train(kind(), devices=world, max_steps=2, strategy=strategy)


@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 2)])
def test_samplers_by_world_rank_are_refused(world: int, stages: int) -> None:
    with pytest.raises(RankError, match=r"DistributedSampler\(num_replicas=.*, rank=.*pipeline"):
        run_ranks(sample, world, OwnSampler, stages)
    expected = run_ranks(sample, world, RightSampler, stages)[0]
    found = run_ranks(sample, world, AskingSampler, stages)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class AsTold(RightSampler):
    """Notes what the Trainer tells where the loader is made."""

    def shares(self) -> dict[str, int]:
        told = self.trainer
        self.told = told.global_rank, told.world_size, told.is_global_zero
        self.strategies = told.strategy.replicas, told.strategy.stage
        return super().shares()


def sample_by_torchrun(stages: int) -> Any:
    """With the variables that torchrun sets, which its environment reads whenever it is asked."""
    rank, world = dist.get_rank(), dist.get_world_size()
    of_torchrun = {"RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    module = AsTold()
    with patch.dict(os.environ, of_torchrun):
        options = {
            "plugins": TorchElasticEnvironment(),
            "strategy": GPipeStrategy(2, stages=stages),
        }
        trainer(devices=world, max_steps=2, **options).fit(module)
    return module.told, module.strategies


@pytest.mark.parametrize(("world", "stages"), [(2, 2), (4, 2)])
def test_hooks_that_make_loaders_are_told_of_all_processes(world: int, stages: int) -> None:
    found = run_ranks(sample_by_torchrun, world, stages)
    assert [told for told, _ in found] == [(rank, world, rank == 0) for rank in range(world)]
    assert {replicas for _, (replicas, _) in found} == {world // stages}


class GathersInPlace(models.Module):
    """Puts its own rows where those of all processes would be, as CLIP's ports do."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self(x)
        rows = self.all_gather(out.detach()).reshape(-1, *out.shape)
        rows[self.global_rank] = out
        return nn.functional.mse_loss(rows[0], y)


def test_a_rank_that_is_no_replicas_is_told_of() -> None:
    with pytest.raises(RankError, match=r"IndexError.*(?s:.)*distributed_sampler_kwargs\['rank'\]"):
        run_ranks(sample, 2, GathersInPlace, 2)


class Shares(L.LightningDataModule):
    """Shares data out by the number of processes, or that of replicas."""

    asks = True

    def setup(self, stage: str) -> None:
        data = torch.randn(2, 32, models.WIDTH, dtype=torch.float64)
        shares = _processes() if self.asks else self.trainer.strategy.replicas
        self.data = TensorDataset(*data[:, ::shares])

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


class SharesRightly(Shares):
    asks = False


def _processes() -> int:
    return dist.get_world_size()


class Gathers(nn.Module):
    """A loss that asks, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean() / dist.get_world_size()


class Gathering(models.Module):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = Gathers()(self(x))
        return out


class ComputesInSteps(models.Module):
    """Has a metric that asks, and means it."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.error.update(loss.detach().float(), torch.zeros((), device=loss.device))
        self.log("error", self.error.compute())
        return loss


class ReadsDevices(models.Module):
    """Scales its learning rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.num_devices)


class Codebook(nn.Module):
    """Sums over processes, as one that is written for DDP."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return x.square().mean() + 0 * total


class Sums(models.Module):
    def build(self) -> None:
        super().build()
        self.codebook = Codebook()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.codebook(self(x))
        return out


class ReadsData(models.Module):
    """Looks at the data itself, as for their mean."""

    def on_fit_start(self) -> None:
        for _ in DataLoader(list(range(4))):
            pass


def told_of_processes(module: type[models.Module], data: Any, stages: int) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(2, stages=stages)
        train(module(), data and data(), devices=2, max_steps=1, strategy=strategy)
    texts = [str(each.message) for each in found]
    return [text[:40] for text in texts if "stages x" in text]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("module", "data"),
    [
        *((models.Module, Shares), (models.Module, SharesRightly)),
        *((Gathering, None), (ComputesInSteps, None), (ReadsDevices, None), (Sums, None)),
        (ReadsData, None),
    ],
)
def test_the_number_of_processes_is_told_of(module: Any, data: Any, stages: int) -> None:
    found = run_ranks(told_of_processes, 2, module, data, stages)[0]
    tells_nothing = module in (ComputesInSteps, ReadsData) or data is SharesRightly
    is_told = stages == 2 and not tells_nothing
    told = {
        ReadsDevices: "trainer.num_devices is 2 here: 2 stages ",
        Sums: "torch.distributed.all_reduce() goes over",
    }.get(module, "torch.distributed.get_world_size() is 2 ")
    assert found == [told] * is_told


class Counting(models.Module):
    """Moves a buffer in its steps, of which every second one has no backward."""

    def build(self) -> None:
        super().build()
        self.register_buffer("level", torch.zeros(models.WIDTH))
        self.levels: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.level += batch[0].mean(0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.fit_loop._skip_backward = batch_idx % 2 == 1  # as StochasticWeightAveraging

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.levels.append(self.level.clone())


class CountingByHand(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.manual_backward(loss)
            self.optimizers().step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


def counted(kind: type[Counting]) -> list[Tensor]:
    module, devices = kind(), dist.get_world_size()
    train(module, devices=devices, max_epochs=1, strategy=GPipeStrategy(2, stages=2))
    return module.levels


@pytest.mark.parametrize("kind", [Counting, CountingByHand])
def test_replicas_share_buffers_after_steps_without_a_backward(kind: type[Counting]) -> None:
    found = run_ranks(counted, 4, kind)
    assert len(found[0]) > 2
    for rank in (1, 2, 3):
        torch.testing.assert_close(found[rank], found[0], rtol=0, atol=0)


def without_parameters(state: dict[str, Tensor], stages: int) -> dict[str, Tensor]:
    module = Odd()
    module.load_state_dict(state)
    strategy: Any = GPipeStrategy(3, stages=2, balance=[5, 1]) if stages else DDPStrategy()
    return train(module, **{**OPTIONS, "devices": dist.get_world_size(), "strategy": strategy})


def test_a_stage_without_parameters() -> None:
    state = initial("Odd")
    expected = run_ranks(without_parameters, 2, state, 0)[0]
    whole = run_ranks(without_parameters, 4, state, 2)[0]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Thawing(models.Module):
    """Unfreezes layers in the middle of the training."""

    def build(self) -> None:
        super().build()
        self.backbone[0].requires_grad_(False)
        self.backbone[4].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone[0].requires_grad_(batch_idx >= 2)
        self.backbone[4].requires_grad_(batch_idx >= 3)


def thaw(state: dict[str, Tensor], pipeline: bool) -> dict[str, Tensor]:
    module = Thawing()
    module.load_state_dict(state)
    strategy: Any = GPipeStrategy(3, stages=2) if pipeline else "auto"
    return train(
        module,
        max_steps=6,
        devices=4 if pipeline else 1,
        strategy=strategy,
        use_distributed_sampler=False,  # DistributedDataParallel itself can't do it
    )


def test_layers_that_are_unfrozen_later() -> None:
    torch.manual_seed(1)
    state = Thawing().state_dict()
    expected = run_ranks(thaw, 1, state, False)[0]
    assert not torch.equal(expected["backbone.4.weight"], state["backbone.4.weight"])
    for result in run_ranks(thaw, 4, state, True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


class Batches(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Uneven(models.Module):
    """Replicas read batches of different lengths, so they have unequal numbers of micro-batches."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(2, 20, models.WIDTH, generator=generator, dtype=torch.float64)
        replica = self.trainer.distributed_sampler_kwargs["rank"] if self._trainer else 0
        sizes = [[5, 1, 3], [2, 6, 1]][replica]
        start = 10 * replica
        batches = [(x[start : start + n], y[start : start + n]) for n in sizes for _ in range(2)]
        return DataLoader(Batches(batches), batch_size=None)


def uneven(stages: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    module = Uneven()
    module.load_state_dict(state)
    strategy: Any = GPipeStrategy(4, stages=stages) if stages else DDPStrategy()
    devices = dist.get_world_size()
    return train(module, devices=devices, max_steps=5, strategy=strategy)


def test_unequal_numbers_of_micro_batches() -> None:
    torch.manual_seed(0)
    state = Uneven().state_dict()
    expected = run_ranks(uneven, 2, 0, state)[0]
    whole = run_ranks(uneven, 4, 2, state)[0]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Contrasting(models.Module):
    """Compares samples with those of all replicas."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.backbone(x)
        others = self.all_gather(out, sync_grads=True).flatten(0, 1)
        return (out @ others.T).square().mean() + nn.functional.mse_loss(out, y)


def contrasted(stages: int, step: Any = "mini-batch") -> dict[str, Tensor]:
    torch.manual_seed(4)
    strategy: Any = DDPStrategy()
    if stages:
        strategy = GPipeStrategy(2, stages=stages, step=step)
    return train(Contrasting("sgd"), devices=dist.get_world_size(), strategy=strategy, max_steps=3)


@pytest.mark.parametrize("stages", [1, 2])
def test_gathered_features_have_gradients(stages: int) -> None:
    expected = run_ranks(contrasted, 2, 0)[0]
    for found in run_ranks(contrasted, 2 * stages, stages):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Measuring(models.Module):
    """Logs by step what a metric gives for a replica's own batch."""

    def build(self) -> None:
        super().build()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.backbone(x)
        self.error(out, y)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return nn.functional.mse_loss(out, y)


def measured(stages: int, step: Any) -> dict[str, Tensor]:
    torch.manual_seed(4)
    strategy: Any = GPipeStrategy(2, stages=stages, step=step) if stages else DDPStrategy()
    run = trainer(devices=dist.get_world_size(), strategy=strategy, max_epochs=1)
    run.fit(Measuring("sgd"))
    return {name: value.double() for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_a_metric_of_a_step_is_the_replicas_own(step: str) -> None:
    expected = run_ranks(measured, 2, 0, step)
    assert expected[0]["error_step"] != expected[1]["error_step"]
    for rank, found in enumerate(run_ranks(measured, 4, 2, step)):
        torch.testing.assert_close(found, expected[rank // 2], rtol=1e-6, atol=1e-6)


def told_by_replicas() -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(Odd(), devices=2, max_steps=1, strategy=GPipeStrategy(2, stages=1))
    return [str(warning.message) for warning in told]


def test_replicas_warn_of_no_argument_that_nobody_gave() -> None:
    for told in run_ranks(told_by_replicas, 2):
        assert not any("broadcast_buffers" in text for text in told)
