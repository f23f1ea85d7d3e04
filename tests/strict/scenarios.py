"""What is trained over the strict backend: the same must come out as over gloo.

Over gloo the other tests compare with a plain Trainer. Here every rank trains twice, and compares.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests import models, step_models
from tests.ranks import run_ranks
from tests.strict import backend
from tests.training import trainer

RECOMPUTE = ("always", "except_last", "never")
MODES = tuple(f"{which}:{issue}" for which in backend.QUEUES for issue in backend.ISSUES)

HARD = ("device:first", "group:block", "pair:block")  # which the other modes are hardly harder than


class Evaluated(models.Around):
    """Validates every second step, on batches of another size; has dropout and batch norm."""

    def build(self) -> None:
        super().build()
        self.backbone.insert(2, nn.BatchNorm1d(models.WIDTH))
        self.backbone.append(nn.Dropout(0.2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(8)
        x, y = torch.randn(2, 15, models.WIDTH, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, y), batch_size=5)


class Sizes(models.Around):
    """Batches of which now the first, now the second micro-batch is another size than before."""

    def train_dataloader(self) -> Any:
        data = super().train_dataloader().dataset
        bounds = (0, 8, 16, 23, 28)
        sampler = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        return DataLoader(data, batch_sampler=sampler)


class Manual(models.TwoCalls):
    """Steps by itself, with two backwards, clipping in between."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(*batch))
        self.manual_backward(0.5 * self.loss(*batch))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is trained.

    Args:
        module: The module.
        stages: K.
        replicas: D.
        chunks: M.
        strategy: More options of the strategy.
        trainer: Options of the Trainer.
        resume: Whether the run is saved, and goes on from the file.
    """

    module: type[L.LightningModule]
    stages: int
    replicas: int = 1
    chunks: int = 4
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    resume: bool = False


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
CLIPPED = {"gradient_clip_val": 0.01}
SMALL_BUCKETS = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
PER_MICRO_BATCH = {"step": "micro-batch"}
SHARED_OUT = {"shard_optimizer_state": True}
SCENARIOS = {
    "changing shapes": Scenario(models.Lengths, 2),
    "changing sizes": Scenario(Sizes, 2, chunks=2),
    "trees": Scenario(models.Trees, 2, chunks=3),
    "chained calls": Scenario(models.Chained, 3),
    "shared weights, clipping": Scenario(models.Shared, 3, trainer=CLIPPED),
    "validation, files": Scenario(Evaluated, 3, trainer={"val_check_interval": 2}, resume=True),
    "manual": Scenario(Manual, 4),
    "around": Scenario(models.Around, 4, trainer=ACCUMULATED),
    "replicas": Scenario(models.Around, 2, 2, 3, SMALL_BUCKETS, ACCUMULATED),
    "replicas, files": Scenario(
        Evaluated, 2, 2, 3, SHARED_OUT, {"gradient_clip_val": 0.01}, resume=True
    ),
    "replicas of one stage": Scenario(models.Shared, 1, 2, 3, trainer=ACCUMULATED),
    "a step per micro-batch": Scenario(step_models.Measured, 3, strategy=PER_MICRO_BATCH),
    "tied, searched": Scenario(
        step_models.WeightedTied,
        *(4, 1, 6),
        {**PER_MICRO_BATCH, "virtual_stages": 2, "schedule": "searched"},
        ACCUMULATED,
    ),
    "tied, interleaved": Scenario(
        step_models.Looped,
        *(2, 1, 5),
        {**PER_MICRO_BATCH, "virtual_stages": 2, "schedule": "interleaved"},
        CLIPPED,
    ),
    "tied, replicas": Scenario(
        step_models.Tied, 2, 2, 3, {**PER_MICRO_BATCH, **SHARED_OUT}, ACCUMULATED
    ),
}


def fit(scenario: Scenario, recompute: str, over: str) -> dict[str, Tensor]:
    """Train on this rank, and return the weights."""
    L.seed_everything(1 + dist.get_rank(), verbose=False)  # the first one's weights count
    module = scenario.module()
    if isinstance(module, Evaluated):
        module.double()

    def run(steps: int) -> L.Trainer:
        strategy = GPipeStrategy(
            scenario.chunks,
            stages=scenario.stages,
            checkpoint=recompute,  # type: ignore[arg-type]
            process_group_backend=over,
            **scenario.strategy,
        )
        devices = scenario.stages * scenario.replicas
        return trainer(
            max_steps=steps, devices=devices, strategy=strategy, **copy.deepcopy(scenario.trainer)
        )

    if not scenario.resume:
        run(4).fit(module)
        return module.state_dict()
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        path = Path(folder[0]) / "saved.ckpt"

        class Save(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
                if trainer.global_step == 2:
                    trainer.save_checkpoint(path)

        first = run(3)
        first.callbacks.append(Save())
        first.fit(module)
        run(5).fit(module, ckpt_path=path)
        dist.barrier()
    return module.state_dict()


def compare(name: str, mode: str, recompute: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    """Train over both backends on this rank.

    Returns:
        What is wrong, and how many operations of each kind ran.
    """
    wrong: list[str] = []
    backend.register(backend.Rules.of(mode))
    for checkpoint in recompute:
        expected = fit(SCENARIOS[name], checkpoint, "gloo")
        found = fit(SCENARIOS[name], checkpoint, backend.NAME)
        wrong += [
            f"{checkpoint}: {key} differs"
            for key, value in expected.items()
            if not torch.equal(value, found[key])
        ]
    return wrong + backend.violations, dict(backend.counts)


class Failing(models.Module):
    """A layer of the second stage fails in the third step."""

    class Layer(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 8:
                raise ArithmeticError("planted")
            return x

    def build(self) -> None:
        super().build()
        self.backbone.append(self.Layer())


def fail(mode: str) -> None:
    """Train until a stage fails; raises what that comes to on this rank."""
    backend.register(backend.Rules.of(mode))
    strategy = GPipeStrategy(4, checkpoint="never", process_group_backend=backend.NAME)
    try:
        trainer(max_steps=4, devices=2, strategy=strategy).fit(Failing())
    except Exception as error:
        raise RuntimeError(f"{error}; violations: {backend.violations}") from None


def run(name: str, mode: str, recompute: tuple[str, ...] = RECOMPUTE) -> Any:
    """Run a scenario; returns what every rank's :func:`compare` does."""
    scenario = SCENARIOS[name]
    world = scenario.stages * scenario.replicas
    return run_ranks(compare, world, name, mode, recompute, timeout_s=240)
