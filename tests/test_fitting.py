"""What is chosen by memory: recompute, micro-batches, and how deep a model can be."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.fitting import Fitting
from lightning_gpipe.plan.memory import Boundary, HeldTensor, LayerMemory
from lightning_gpipe.plan.model_memory import ModelMemory
from lightning_gpipe.plan.plans import Plan
from lightning_gpipe.schedule.search import search
from tests.ranks import run_ranks
from tests.training import train

WIDTH, SAMPLES = 32, 256


class Deep(L.LightningModule):
    """Blocks of two layers, between an embedding and a head that share a weight or not."""

    def __init__(self, blocks: int, ties: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH, bias=False)
        layers = [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        for _ in range(blocks):
            layers += [nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)]
        self.backbone = nn.Sequential(*layers, nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.backbone(self.embedding(batch))).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2 * SAMPLES, WIDTH), SAMPLES)


def plan(module: L.LightningModule, is_alone: bool = False, **options: Any) -> Plan:
    """The layout that a strategy says, on two devices; of the backbone alone or with the step."""
    chosen = {"chunks": 8, "stages": 2, "memory_limit": None, **options}
    batch = torch.ones(SAMPLES, WIDTH)
    (found,) = (
        GPipeStrategy(**chosen)
        .plan(
            module,
            None if is_alone else batch,
            input=module.embedding(batch) if is_alone else None,
            devices=2,
            device="cpu",
            virtual_stages=[1],
            chunks=[chosen["chunks"]],
            checkpoint=[chosen.get("checkpoint", "always")],
        )
        .all
    )
    return found


def test_as_little_is_recomputed_as_fits() -> None:
    held = {m: plan(Deep(8), checkpoint=m or "never").most for m in range(9)}
    assert [*held.values()] == sorted(held.values(), reverse=True)
    assert held[0] > held[4] > held[8]
    for least in (0, 3, 8):
        found = plan(Deep(8), checkpoint="auto", memory_limit=held[least])
        assert found.fits
        chosen = {"never": 0, "always": 8}.get(str(found.settings.checkpoint))
        assert held[found.settings.checkpoint if chosen is None else chosen] == held[least]  # type: ignore[index]
        before = plan(Deep(8), checkpoint="auto", memory_limit=held[least] - 1)
        assert before.most < held[least] or not before.fits


class Alike(L.LightningModule):
    """Equal layers, whose activations outweigh their parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(24))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_recompute_is_chosen_so_that_a_step_is_short() -> None:
    """Not at the price of stages that take unequally long. Few schedules are searched for."""
    with torch.device("meta"):
        module, batch = Alike(), torch.empty(64, 32, 64)

    def planned(checkpoint: Any, memory: int | None = None) -> Plan:
        (found,) = (
            GPipeStrategy(step="micro-batch")
            .plan(
                *(module, batch),
                devices=4,
                memory=memory,
                device="cpu",
                stages=[4],
                virtual_stages=[1],
                chunks=[16],
                checkpoint=[checkpoint],
            )
            .all
        )
        return found

    limit = (planned("never").most + planned("always").most) // 2
    search.cache_clear()
    found = planned("auto", limit)
    assert search.cache_info().misses <= 16  # of some 80 that are asked for
    count = int(found.settings.checkpoint)
    assert found.fits
    assert found.length == planned(count).length
    assert planned(count - 1).most > limit


def made_up(numbers: random.Random, layers: int) -> ModelMemory:
    """Layers of unequal weights, whose boundaries are as large as what they hold."""
    widths = [numbers.choice([1, 2, 4, 8]) * 100_000 for _ in range(layers + 1)]
    found = []
    for i, (before, after) in enumerate(pairwise(widths)):
        weight = numbers.randrange(1, 20) * 100_000
        held = HeldTensor(i, weight, weight, 2 * weight)
        boundaries = Boundary(before, before), Boundary(after, after)
        saved = {3 * i + k: after for k in range(3)}
        rest = 2 * after, before + after, after, 1, before + after, before
        found.append(LayerMemory((held,), *boundaries, 0, saved, *rest))
    return ModelMemory(tuple(found), (), ((), ()))


def test_a_cut_is_found_where_there_is_one() -> None:
    """For limits 10 % above the least with which any cut fits; 9 of 10 times at least."""
    numbers, layers, stages, chunks = random.Random(3), 9, 3, 4
    found = []
    for _ in range(10):
        memory = made_up(numbers, layers)
        costs = [float(numbers.randrange(1, 20)) for _ in range(layers)]
        given = iter(costs)
        balancing = Balancing([nn.Identity()] * layers, lambda *_: None, None, list, print)
        settings = GPipeStrategy(
            chunks,
            stages=stages,
            step=numbers.choice(["mini-batch", "micro-batch"]),
            checkpoint=numbers.choice(["always", "never", 3]),
            balance=lambda *_, given=given: next(given),
        )._settings
        cuts = ([0, *bounds, layers] for bounds in combinations(range(1, layers), stages - 1))
        sizes = [tuple(b - a for a, b in pairwise(bounds)) for bounds in cuts]
        least = min(
            memory.expected(Partition(each, tuple(costs), "any"), settings, chunks).highest
            for each in sizes
        )
        settings = replace(settings, memory_limit=int(1.1 * least))
        fitting = Fitting(balancing, lambda _, memory=memory: memory, None, stages, 1)
        found.append(fitting.fit(settings, [chunks]).fits(settings.limit))
    assert sum(found) >= 9


class Watch(L.Callback):
    """Keeps what a run decided."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        cut = trainer.strategy._run.pipeline._state
        around = cut.surroundings
        most = max(memory.total for memory in cut.memory.most)
        self.found = around.settings.checkpoint, around.chunks, most


def fitted_in_runs() -> list[tuple[Any, Any, int]]:
    watch, found = Watch(), []
    for options in FITTED:
        strategy = GPipeStrategy(stages=2, **options)
        train(Deep(8), max_epochs=1, devices=2, strategy=strategy, callbacks=[watch])
        found.append(watch.found)
    return found


FITTED: list[dict[str, Any]] = [
    {"chunks": 8, "checkpoint": "auto", "memory_limit": "1GB"},
    {"chunks": 8, "checkpoint": "auto", "memory_limit": "700kB"},
    {"chunks": "auto", "checkpoint": "always", "memory_limit": "445kB"},
]


def test_a_run_chooses_what_a_plan_tells() -> None:
    """Of the backbone: the step isn't known to a run before it has run one."""
    planned = [plan(Deep(8), True, **{**options, "chunks": 8}) for options in FITTED[:2]]
    planned.append(plan(Deep(8), True, **{**FITTED[2], "chunks": 16}))
    expected = [(p.settings.checkpoint, p.settings.chunks, p.most) for p in planned]
    for chosen in run_ranks(fitted_in_runs, 2):
        assert chosen == expected
    assert expected[0][0] == "never"
    assert expected[1][0] in range(1, 8)
    fewer = plan(Deep(8), True, **{**FITTED[2], "chunks": 8})  # which "auto" takes without a limit
    assert not fewer.fits


def those_that_fit(depths: Sequence[int], limit: int, **options: Any) -> list[int]:
    """With how many blocks a model fits, of those that are built."""
    return [n for n in depths if plan(Deep(n, **options), memory_limit=limit).fits]


@pytest.mark.parametrize("ties", [False, True])
def test_the_largest_depth_is_that_of_models_that_are_built(ties: bool) -> None:
    for limit in (400_000, 1_000_000):
        depth = plan(Deep(4, ties), memory_limit=limit).depth
        assert depth is not None
        assert (depth.block.start, depth.block.length) == (2, 2)
        most = depth.most
        assert most is not None
        depths = range(most - 1, most + 4)
        assert those_that_fit(depths, limit, ties=ties) == [most - 1, most]
    nothing = plan(Deep(4, ties), memory_limit=1000).depth
    assert nothing is not None
    assert nothing.most is None


class Small(L.LightningModule):
    """A backbone of equal layers.

    Args:
        depth: How many.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def largest_depth(depth: int, memory: str) -> tuple[int | None, bool, str]:
    strategy = GPipeStrategy(4, stages=2, checkpoint="always")
    x = torch.empty(16, 64, device="meta")
    found = strategy.plan(Small(depth), x, devices=2, memory=memory, device="cpu").all[0]
    assert found.depth is not None
    return found.depth.most, found.depth.is_exact, str(found)


def test_the_largest_depth_does_not_depend_on_the_depth_asked_about() -> None:
    most, is_exact, text = largest_depth(4, "32MB")
    assert is_exact
    assert f"up to {most:,} fit" in text
    assert (most, is_exact) == largest_depth(100, "32MB")[:2]


def test_a_depth_beyond_those_tried_is_told_as_the_least() -> None:
    most, is_exact, text = largest_depth(4, "16GB")
    assert not is_exact
    assert f"at least {most:,} fit" in text


def test_memory_that_is_not_known_is_asked_for() -> None:
    strategy = GPipeStrategy(8, checkpoint="auto")
    with pytest.raises(ValueError, match="memory_limit"):
        train(Deep(1), devices=1, strategy=strategy, max_epochs=1)


def test_replicas_share_the_optimizer_states() -> None:
    held = []
    for shares in (False, True):
        strategy = GPipeStrategy(8, stages=1, shard_optimizer_state=shares)
        x = torch.ones(SAMPLES, WIDTH)
        found = strategy.plan(Deep(8), x, devices=4, device="cpu", checkpoint=["always"]).all[0]
        (stage,) = found.stages
        assert stage.memory.optimizer is not None
        held.append(stage.memory.optimizer)
    assert held[0] / 4 <= held[1] < held[0] / 3


class Slow(nn.Module):
    """Takes its time, forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x * 2


def test_measured_layers_tell_seconds() -> None:
    module = Deep(1)
    module.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), Slow(), nn.Linear(WIDTH, WIDTH))
    x = torch.ones(SAMPLES, WIDTH)
    strategy = GPipeStrategy(4, stages=1, checkpoint="never")
    options: dict[str, Any] = {"devices": 1, "device": "cpu", "checkpoint": ["never"]}
    (found,) = strategy.plan(module, x, measured=True, **options).all
    assert found.is_measured
    assert found.seconds is not None
    assert 4 * 0.02 < found.seconds < 1
    assert "by what layers took alone" in str(strategy.plan(module, x, measured=True, **options))
    with pytest.raises(ValueError, match="Layers on the meta device have no values"):
        strategy.plan(Deep(1).to("meta"), x, measured=True, **options)
