"""Every built-in callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.compatibility.rows import STAGES, Module, Refused, Row, Rows, Shown, check, logged
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Epochs(Module):
    """Logs what gets worse."""

    def on_validation_epoch_end(self) -> None:
        self.log("worse", torch.tensor(float(self.current_epoch)))


class Trainable(Module):
    """Its optimizer has what isn't frozen alone, as fine-tuning wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class Normalised(Trainable):
    """Batch norm in what is frozen, which keeps its statistics."""

    def build(self) -> None:
        super().build()
        self.backbone.insert(1, nn.BatchNorm1d(6))


class Rate(Module):
    """Has a learning rate to find."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Example(Module):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 6, dtype=torch.float64)


class Flops(Module):
    flops_per_batch = 1000
    batch_size = 6


class Unfreeze(cb.BaseFinetuning):
    """Trains the module before the backbone from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.before)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.before, optimizer)


class Saver(cb.Checkpoint):
    """A user's own kind of checkpoint."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint("own.ckpt")


class Writer(cb.BasePredictionWriter):
    """Keeps predictions as files, on one rank."""

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *_: Any) -> None:
        pl_module.count("written")

    def write_on_epoch_end(self, trainer: Any, *args: Any) -> None:
        predictions = args[1]
        if trainer.is_global_zero:
            torch.save(predictions, "predictions.pt")


class Summary(cb.ModelSummary):
    """Keeps the numbers."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        summary = self._summary(trainer, pl_module)
        pl_module.counts["summary"] = str(summary)


class RichSummary(cb.RichModelSummary, Summary):
    """The same, in colours."""


def own(folder: Path) -> dict[str, Any]:
    return {"default_root_dir": folder, "enable_checkpointing": True, "callbacks": [Saver()]}


def weights(run: L.Trainer, module: Any, folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "own.ckpt", weights_only=True)["state_dict"]


def predicted(run: L.Trainer, module: Any, folder: Path) -> Any:
    run.predict(module)
    return torch.load(folder / "predictions.pt", weights_only=True)


def saving(**options: Any) -> Any:
    """A ModelCheckpoint."""

    def make(folder: Path) -> dict[str, Any]:
        checkpoint = cb.ModelCheckpoint(folder, **options)
        return {"enable_checkpointing": True, "callbacks": [checkpoint], "max_epochs": 3}

    return make


def saved(run: L.Trainer, module: Any, folder: Path) -> Any:
    best: Any = run.checkpoint_callback
    return (
        sorted(path.name for path in folder.glob("*.ckpt")),
        Path(best.best_model_path).name,
        best.best_model_score,
    )


def logging(*callbacks: cb.Callback) -> Any:
    """Callbacks beside a logger."""

    def make(folder: Path) -> dict[str, Any]:
        logger = CSVLogger(folder, "logs")
        return {"logger": logger, "log_every_n_steps": 1, "callbacks": [*callbacks]}

    return make


def columns(run: L.Trainer, module: Any, folder: Path) -> list[str]:
    """What was logged; the numbers are times and loads."""
    return sorted({name for row in logged(run, module, folder) for name in row})


def bars(run: L.Trainer, module: Any, folder: Path) -> Any:
    assert run.progress_bar_callback.is_enabled == run.is_global_zero
    return run.progress_bar_metrics


def exception(folder: Path) -> None:
    """Nothing is saved, because nobody can be waited for; the error stays in front."""
    with pytest.raises(RankError) as caught:
        run_ranks(_exception, 2, str(folder))
    assert "broken on purpose" in str(caught.value)
    assert not [*folder.glob("*.ckpt")]


def _exception(folder: str) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("broken on purpose")
            return super().training_step(batch, batch_idx)

    saver = cb.OnExceptionCheckpoint(folder)
    run = trainer(
        devices=2,
        strategy=GPipeStrategy(3),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    run.fit(Broken())


def sharded(folder: Path) -> None:
    """Samples and operations count once for a pipeline, not once for each of its stages."""
    plain = _rates(0, str(folder / "plain"))
    found = run_ranks(_rates, 2, 2, str(folder / "pipeline"))[0]
    assert found["world_size"] == plain["world_size"] == 1
    assert found["columns"] == plain["columns"]


class Monitor(cb.ThroughputMonitor):
    """Keeps the number of devices that it counts."""

    def on_train_end(self, *args: Any) -> None:
        super().on_train_end(*args)
        self.sizes = {throughput.world_size for throughput in self._throughputs.values()}


def _rates(stages: int, folder: str) -> dict[str, Any]:
    monitor = Monitor(batch_size_fn=lambda batch: len(batch[0]))
    options: dict[str, Any] = logging(monitor)(Path(folder))
    if stages:
        options.update(devices=stages, strategy=GPipeStrategy(3))
    run = trainer(**{"devices": 1, "max_epochs": 2, **options})
    run.fit(Flops())
    return {"world_size": monitor.sizes.pop(), "columns": sorted(columns(run, None, Path(folder)))}


class Growing(Module):
    """Has a batch size that is searched for."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size)


ROWS: Rows = {
    "BackboneFinetuning": Row(
        {"max_epochs": 3, "callbacks": [cb.BackboneFinetuning(1, train_bn=False)]},
        Normalised,
        strategy={"chunks": 1},
    ),
    "BaseFinetuning": Row({"max_epochs": 3, "callbacks": [Unfreeze()]}, Trainable),
    "BasePredictionWriter": Row({"callbacks": [Writer("batch_and_epoch")]}, also=predicted),
    "BatchSizeFinder": Row(
        {"callbacks": [cb.BatchSizeFinder(steps_per_trial=1, max_trials=2)]},
        Growing,
        per_micro_batch="runs out of memory on purpose",
    ),
    "Callback": Row({"callbacks": [cb.Callback()]}),
    "Checkpoint": Row(own, also=weights),
    "DeviceStatsMonitor": Row(logging(cb.DeviceStatsMonitor(cpu_stats=True)), also=columns),
    "EMAWeightAveraging": Row({"max_epochs": 3, "callbacks": [cb.EMAWeightAveraging(decay=0.9)]}),
    "EarlyStopping": Row(
        {"max_epochs": 9, "callbacks": [cb.EarlyStopping("worse", patience=2)]}, Epochs
    ),
    "GradientAccumulationScheduler": Row(
        {"callbacks": [cb.GradientAccumulationScheduler({0: 1, 1: 3})]}
    ),
    "LambdaCallback": Row(
        {"callbacks": [cb.LambdaCallback(on_train_end=lambda run, module: module.count("end"))]}
    ),
    "LearningRateFinder": Row(
        lambda folder: {
            "default_root_dir": folder,
            "callbacks": [cb.LearningRateFinder(num_training_steps=8)],
        },
        Rate,
        also=lambda run, module, folder: module.lr,
    ),
    "LearningRateMonitor": Row(
        logging(cb.LearningRateMonitor("step")),
        Rate,
        also=logged,
    ),
    "ModelCheckpoint": Row(saving(monitor="val_loss", save_top_k=2, save_last=True), also=saved),
    "ModelCheckpoint(every_n_train_steps)": Row(
        saving(every_n_train_steps=3, save_top_k=-1), also=saved
    ),
    "ModelPruning": Refused(
        "ModelPruning replaces parameters", {"callbacks": [cb.ModelPruning("l1_unstructured")]}
    ),
    "ModelSummary": Row({"callbacks": [Summary(2)]}, Example),
    "OnExceptionCheckpoint": Shown(exception),
    "ProgressBar": Row({"enable_progress_bar": True}, also=bars),
    "RichModelSummary": Row({"callbacks": [RichSummary(2)]}, Example),
    "RichProgressBar": Row(
        {"enable_progress_bar": True, "callbacks": [cb.RichProgressBar()]}, also=bars
    ),
    "SpikeDetection": Row({"callbacks": [cb.SpikeDetection(warmup=2)]}),
    "StochasticWeightAveraging": Row(
        {"max_epochs": 4, "callbacks": [cb.StochasticWeightAveraging(1e-2, 2, 1)]}
    ),
    "TQDMProgressBar": Row(
        {"enable_progress_bar": True, "callbacks": [cb.TQDMProgressBar()]}, also=bars
    ),
    "ThroughputMonitor": Shown(sharded),
    "Timer": Row({"callbacks": [cb.Timer("00:01:00:00")]}),
    "WeightAveraging": Row({"max_epochs": 3, "callbacks": [cb.WeightAveraging()]}),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)


class Other(Module):
    def build(self) -> None:
        super().build()
        self.backbone = nn.Sequential(*(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(9)))


class Normed(Module):
    def build(self) -> None:
        super().build()
        width = models.WIDTH
        layers = [
            layer
            for _ in range(3)
            for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())
        ]
        self.backbone = nn.Sequential(*layers)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_averaged_weights_get_batch_norm_of_their_own(step: str) -> None:
    """Lightning computes it in one more epoch, without backwards."""
    plain = _batch_norm_averaged({"devices": 1})
    strategy = {"devices": STAGES, "strategy": GPipeStrategy(1, step=step)}  # type: ignore[arg-type]
    torch.testing.assert_close(run_ranks(_batch_norm_averaged, STAGES, strategy)[0], plain)


def _batch_norm_averaged(options: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    module, averaging = Normed(), cb.StochasticWeightAveraging(1e-2, 2, 1)
    trainer(max_epochs=4, callbacks=[averaging], **options).fit(module)
    return module.state_dict()


def test_another_module_after_averaging() -> None:
    """The average that the callback keeps is none of it."""
    first, second = run_ranks(_another, STAGES)
    assert first == second


def _another() -> Any:
    averaging = cb.WeightAveraging()
    run = trainer(devices=STAGES, strategy=GPipeStrategy(3), max_epochs=1, callbacks=[averaging])
    run.fit(Module())
    return run.test(Other(), verbose=False)
