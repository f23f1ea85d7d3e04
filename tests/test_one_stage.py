"""With one stage and one replica a run is a plain Trainer's: nothing is on another stage."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import Blocks, GPipeStrategy
from tests.compatibility.rows import assert_same
from tests.ranks import run_ranks
from tests.training import trainer

WIDTH = 6


class Plain(L.LightningModule):
    """Trains, validates and predicts in double precision; subclasses vary it."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.lr = 1e-2
        self.before = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.double()
        self.example_input_array = torch.ones(2, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.backbone(self.before(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return self.loader(1)

    def val_dataloader(self) -> Any:
        return self.loader(2)

    predict_dataloader = val_dataloader

    def loader(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 24, WIDTH, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)


class Skips(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2, line_search_fn="strong_wolfe")


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: the norm of all gradients, and a second backward."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        again = torch.enable_grad()(closure)
        loss = again()
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients: list[Any] = [p.grad for p in parameters]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        moves = [0.05 * g / norm for g in gradients]
        torch._foreach_add_(parameters, moves)
        again()
        torch._foreach_sub_(parameters, moves)
        torch._foreach_sub_(parameters, [0.01 * p.grad for p in parameters])
        return loss


class SharpnessAware(Plain):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters())


class NoOptimizer(Plain):
    def configure_optimizers(self) -> Any:
        return None


class Alone(Plain):
    """Calls ``backward`` itself, for two losses at once, and clips by PyTorch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2:
            self.loss(batch).backward()
        else:
            torch.autograd.backward([self.loss(batch), self(batch[0]).square().mean()])
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        optimizer.step()


class OwnBackward(Plain):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class LayerByLayer(Plain):
    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        for layer in self.backbone:
            x = layer(x)
        return x


class PartByPart(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.backbone[1:](self.backbone[0](self.before(x)))


class Penalised(Plain):
    """An L1 term and a tied use of a weight of the backbone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        tied = nn.functional.linear(batch[0], self.backbone[0].weight).square().mean()
        return {"loss": loss + 1e-2 * sum(p.abs().sum() for p in self.parameters()) + tied}


class Norms(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class ByValidation(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class TwoOptimizers(Alone):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.before.parameters(), lr=0.1)
        second = torch.optim.AdamW(self.backbone.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 2) for o in (first, second)]


class EndsEpoch(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class Boring(BoringModel):
    """Lightning's own, with an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))  # type: ignore[assignment]


class BoringManual(ManualOptimBoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))  # type: ignore[assignment]


class Autoencoder(L.LightningModule):
    """That of Lightning's first page."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 28 * 28))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        images = torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(images), batch_size=4)


class Demo(LightningTransformer):
    """Lightning's own, smaller, with the encoder's layers as blocks and tokens at hand."""

    def __init__(self) -> None:
        super().__init__(vocab_size=11)
        self.model = type(self.model)(vocab_size=11, ninp=8, nhead=2, nhid=8, dropout=0.0)
        encoder = self.model.transformer.encoder
        encoder.layers = Blocks(encoder.layers)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> Any:
        tokens = torch.randint(11, (2, 8, 5), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(*tokens), batch_size=4)


class Draws(L.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        torch.rand(3)


@dataclass(frozen=True)
class Case:
    """A run to compare.

    Args:
        module: What is trained.
        options: Given the folder, the Trainer's.
        backbone: The name of what is cut.
        error: What ends the run, with both Trainers.
    """

    module: Callable[[], Any] = Plain
    options: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})
    backbone: str | None = None
    error: str = ""
    atol: float = 1e-10


def with_callback(make: Callable[[Path], Any], **others: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"callbacks": [make(folder)], **others}


CASES = {
    "BoringModel": Case(Boring, atol=1e-6),
    "ManualOptimBoringModel": Case(BoringManual, atol=1e-6),
    "the autoencoder of the first page": Case(Autoencoder, backbone="encoder", atol=1e-6),
    "LightningTransformer": Case(Demo, backbone="model.transformer.encoder.layers", atol=1e-5),
    "training_step returns None": Case(Skips),
    "LBFGS": Case(Lbfgs, atol=1e-6),
    "SAM": Case(SharpnessAware),
    "no optimizer": Case(NoOptimizer),
    "loss.backward() in manual optimization": Case(Alone),
    "the module's own backward": Case(OwnBackward),
    "layer by layer": Case(LayerByLayer),
    "part by part": Case(PartByPart),
    "an L1 term and a tied weight": Case(Penalised),
    "grad_norm": Case(Norms),
    "a scheduler with monitor": Case(ByValidation),
    "two optimizers with schedulers": Case(TwoOptimizers),
    "on_train_batch_start ends the epoch": Case(EndsEpoch),
    "BatchSizeFinder": Case(
        options=with_callback(
            lambda _: BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2)
        )
    ),
    "LearningRateFinder": Case(
        options=with_callback(lambda _: LearningRateFinder(num_training_steps=5))
    ),
    "ModelPruning": Case(options=with_callback(lambda _: ModelPruning("l1_unstructured"))),
    "OnExceptionCheckpoint": Case(
        options=lambda folder: {
            "callbacks": [OnExceptionCheckpoint(folder, filename="failed"), Fails()],
            "enable_checkpointing": True,
        },
        error="the disk is full",
    ),
    "ModelCheckpoint": Case(
        options=with_callback(
            lambda folder: ModelCheckpoint(
                folder, monitor="val_loss", save_last=True, save_on_exception=True
            ),
            enable_checkpointing=True,
        )
    ),
    "EarlyStopping": Case(options=with_callback(lambda _: EarlyStopping("val_loss", 10.0))),
    "SWA": Case(options=with_callback(lambda _: StochasticWeightAveraging(1e-2, 1))),
    "accumulation by epoch": Case(
        options=with_callback(lambda _: GradientAccumulationScheduler({0: 1, 1: 2}))
    ),
    "random numbers of a callback": Case(options=with_callback(lambda _: Draws())),
    "log_graph": Case(options=lambda folder: {"logger": TensorBoardLogger(folder, log_graph=True)}),
    "CSVLogger": Case(
        options=lambda folder: {
            "logger": CSVLogger(folder),
            "log_every_n_steps": 1,
            "callbacks": [LearningRateMonitor()],
        }
    ),
    "fast_dev_run": Case(options=lambda _: {"fast_dev_run": True}),
    "overfit_batches": Case(options=lambda _: {"overfit_batches": 2}),
    "clipping": Case(options=lambda _: {"gradient_clip_val": 0.01}),
    "detect_anomaly": Case(options=lambda _: {"detect_anomaly": True}),
    "a profiler": Case(options=lambda _: {"profiler": "simple", "inference_mode": False}),
    "max_time and steps": Case(options=lambda _: {"max_time": "00:01:00:00", "max_steps": 3}),
}


class Fails(L.Callback):
    def on_train_batch_end(self, run: L.Trainer, module: Any, *_: Any) -> None:
        if run.global_step == 3:
            raise OSError("the disk is full")


class Hooks(L.Callback):
    """Notes what is called, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            self.called.append(name)
        return super().__getattribute__(name)


def live(name: str, folder: str, is_pipeline: bool) -> dict[str, Any]:
    """Fit, and tell all that can be seen of the run."""
    case, place = CASES[name], Path(folder)
    place.mkdir()
    os.chdir(place)
    L.seed_everything(5, verbose=False)
    options = case.options(place)
    hooks = Hooks()
    strategy: Any = GPipeStrategy(2, backbone=case.backbone) if is_pipeline else "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = case.module()
        options = {"max_epochs": 2, **options}
        options["callbacks"] = [*options.get("callbacks", []), hooks]
        run = trainer(devices=1, strategy=strategy, **options)
        error = ""
        try:
            run.fit(module)
        except OSError as raised:
            error = str(raised)
        predictions = run.predict(module) if type(module) is Plain and not error else None
    return {
        "error": error,
        "weights": module.state_dict(),
        "metrics": {key: value.item() for key, value in run.callback_metrics.items()},
        "progress": (run.global_step, run.current_epoch, run.fit_loop.epoch_loop.total_batch_idx),
        "stopped": (run.should_stop, run.state.status.value, run.num_training_batches),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "hooks": hooks.called,
        "callbacks": [type(callback).__name__ for callback in run.callbacks],
        "batch_size": getattr(module, "batch_size", None),
        "predictions": predictions,
        "files": sorted(path.name for path in place.rglob("*") if "tfevents" not in path.name),
        "rows": [
            {key: float(value) for key, value in row.items() if value}
            for path in place.rglob("metrics.csv")
            for row in csv.DictReader(path.open())
        ],
    }


@pytest.mark.parametrize("name", CASES)
def test_a_plain_trainers_run(name: str, tmp_path: Path) -> None:
    plain = run_ranks(live, 1, name, str(tmp_path / "plain"), False)[0]
    found = run_ranks(live, 1, name, str(tmp_path / "pipeline"), True)[0]
    case = CASES[name]
    assert plain["error"] == case.error
    if name == "CSVLogger":  # how it was trained stands beside the hyperparameters
        found["files"] = [name for name in found["files"] if name != "hparams.yaml"]
    assert_same(found, plain, case.atol)


class TrainsAnother(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.manual_seed(4)
        self.other = Plain()
        trainer(devices=1, strategy=GPipeStrategy(2), max_steps=2).fit(self.other)


def test_a_hook_may_train_another_module() -> None:
    torch.manual_seed(4)
    expected = Plain()
    trainer(devices=1, max_steps=2).fit(expected)
    trains = TrainsAnother()
    trainer(devices=1, strategy=GPipeStrategy(2), max_steps=2, callbacks=[trains]).fit(Plain())
    torch.testing.assert_close(trains.other.state_dict(), expected.state_dict())
