"""What users call and rely on, beyond arguments, hooks and plugins."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
import torchmetrics
import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpipe import GPipeStrategy
from tests import models, wandb_file
from tests.compatibility.rows import STAGES, Module, Refused, Row, Rows, Shown, check
from tests.ranks import run_ranks
from tests.training import trainer

KINDS = ("weight", "bias")


def stepped_by(make: Any, base: Any = Module) -> Any:
    """A module with another optimizer."""

    class Optimized(base):
        def configure_optimizers(self) -> Any:
            return make(self)

    return Optimized


def optimizer(name: str, **options: Any) -> Row:
    kind = getattr(torch.optim, name)
    return Row(module=stepped_by(lambda module: kind(module.parameters(), lr=1e-2, **options)))


def muon(module: Any) -> Any:
    """Takes matrices alone."""
    return torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=1e-2)


def groups(module: Any) -> Any:
    """Two groups, across stages: biases aren't decayed."""
    biases = [p for p in module.parameters() if p.ndim == 1]
    others = [p for p in module.parameters() if p.ndim > 1]
    return torch.optim.AdamW(
        [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 1e-3}], lr=1e-2
    )


def scheduled(interval: str) -> Any:
    def make(module: Any) -> Any:
        stepped = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(stepped, 5)
        return [stepped], [{"scheduler": scheduler, "interval": interval}]

    return make


def plateau(module: Any) -> Any:
    stepped = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(stepped, patience=0, threshold=10.0)
    return {
        "optimizer": stepped,
        "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
    }


def rates(run: L.Trainer, module: Any, folder: Path) -> list[float]:
    return [group["lr"] for group in run.optimizers[0].param_groups]


class Combined(Module):
    """Several loaders in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(*batch["b"])

    def train_dataloader(self) -> Any:
        return CombinedLoader({"a": self.loader(1), "b": self.loader(8)}, "max_size_cycle")


class Several(Module):
    """Several loaders in validation."""

    def val_dataloader(self) -> Any:
        return [self.loader(2), self.loader(9)]


class Stream(Module):
    """Data without a length."""

    def train_dataloader(self) -> Any:
        class Samples(IterableDataset[Any]):
            def __iter__(self) -> Any:
                generator = torch.Generator().manual_seed(3)
                for _ in range(21):
                    yield tuple(
                        torch.randn(2, models.WIDTH, generator=generator, dtype=torch.float64)
                    )

        return DataLoader(Samples(), batch_size=6)


class ReadsItself(Module):
    """Gets an iterator in place of batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(*batch)


class Workers(Module):
    def loader(self, seed: int) -> Any:
        return DataLoader(super().loader(seed).dataset, batch_size=6, num_workers=1)


class Metrics(Module):
    """torchmetrics, as submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.error(self(batch[0]).contiguous(), batch[1])
        self.log("error", self.error)
        self.log_dict({"a": self.global_step, "b": 2.0}, sync_dist=True, add_dataloader_idx=False)


class Gathered(Module):
    def on_train_epoch_end(self) -> None:
        gathered: Any = self.all_gather(torch.tensor(3.0))
        self.log("gathered", gathered.sum())


class Clipped(Module):
    """Clips in its own way, with a norm over all stages."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.log("norm", _norm(self, math.inf))
        self.clip_gradients(self.optimizers(), 0.01, "norm")


class ByStrategy(Module):
    """Clips by what the strategy offers, or by PyTorch's own on one device."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        clip: Any = getattr(strategy, "clip_grad_norm_", nn.utils.clip_grad_norm_)
        self.log("before", clip(self.parameters(), 0.01))
        self.log("after", _norm(self, 2.0))


class Norms(Module):
    """Logs the norm of each gradient, as Lightning's documentation does, and of a part."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log_dict(grad_norm(self.backbone[2:], "inf", group_separator="."))


class Gathers(Module):
    """Logs norms of weights and of gradients, one by one."""

    def on_train_batch_end(self, *_: Any) -> None:
        self._log_norms("weights", gradients=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._log_norms("gradients", gradients=True)

    def _log_norms(self, kind: str, gradients: bool) -> None:
        strategy, names = self.trainer.strategy, [name for name, _ in self.named_parameters()]
        values: Any = [p.grad if gradients else p for p in self.parameters()]
        if isinstance(strategy, GPipeStrategy):
            values = strategy.gathered(self.parameters(), gradients)
        for name, value in zip(names, values, strict=True):
            self.log(f"{kind}/{name}", value.norm())


def _norm(module: L.LightningModule, kind: float) -> Tensor:
    strategy = module.trainer.strategy
    if isinstance(strategy, GPipeStrategy):
        return strategy.grad_norm(module.parameters(), kind)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients, kind)


class Manual(Module):
    """Two optimizers, used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for each in optimizers:
            self.toggle_optimizer(each)
            self.manual_backward(self.loss(*batch))
            self.clip_gradients(each, 0.1)
            each.step()
            each.zero_grad()
            self.untoggle_optimizer(each)
        schedulers: Any = self.lr_schedulers()
        schedulers.step()

    def configure_optimizers(self) -> Any:
        inner = torch.optim.SGD(self.backbone.parameters(), lr=0.1)
        outer = torch.optim.SGD([*self.before.parameters(), *self.after.parameters()], lr=0.1)
        return [inner, outer], [torch.optim.lr_scheduler.StepLR(inner, 2)]


class Partly(Module):
    """Freezes and unfreezes itself."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.freeze()
            self.train()
            self.after.requires_grad_(True)
        else:
            self.unfreeze()


class Hyper(Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


class Example(Module):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, models.WIDTH, dtype=torch.float64)


class Compiled(Module):
    """Layers compiled one by one."""

    def build(self) -> None:
        super().build()
        for layer in self.backbone:
            layer.compile(backend="eager")


class Whole(Module):
    """The backbone compiled as one."""

    def build(self) -> None:
        super().build()
        self.backbone.compile(backend="eager")


class Loose(Module):
    """Doesn't mind what a checkpoint has too much."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"]["unknown"] = torch.zeros(1)


class Synchronized(Module):
    def build(self) -> None:
        super().build()
        self.backbone.insert(1, nn.SyncBatchNorm(models.WIDTH))


class Watched(Module):
    """As after ``wandb.watch(module, log="all")``."""

    def __init__(self) -> None:
        super().__init__()
        self._wandb_hook_names = ["parameters/"]


class Sparse(Module):
    """An embedding outside the backbone, whose gradient is sparse."""

    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(5, models.WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


def sparse_adam(module: Any) -> Any:
    return torch.optim.SparseAdam(module.table.parameters(), lr=1e-2)


def reloaded(run: L.Trainer, module: Any, folder: Path) -> Any:
    path = folder / "saved.ckpt"
    run.save_checkpoint(path)
    run.strategy.barrier()
    other = Hyper.load_from_checkpoint(path, map_location="cpu", weights_only=False)
    return dict(other.hparams), other.state_dict()


def resumed(run: L.Trainer, module: Any, folder: Path) -> Any:
    run.save_checkpoint(folder / "saved.ckpt")
    return run.validate(module, ckpt_path=folder / "saved.ckpt", verbose=False, weights_only=False)


def watched(folder: Path) -> None:
    """The gradients of the first stage and of what is outside the backbone are logged."""
    run_ranks(_watch, STAGES, str(folder))
    (run,) = folder.glob("wandb/*-run-*/*.wandb")
    _, history = wandb_file.read(run)
    names = {name.split("/")[1] for row in history for name in row if name.startswith("gradients")}
    layers = {
        f"{layer}.{kind}"
        for layer in ("before", "backbone.0", "backbone.2", "after")
        for kind in KINDS
    }
    assert names == layers


def _watch(folder: str) -> None:
    logger = WandbLogger(project="watched", offline=True, save_dir=folder)
    module = Module()
    if os.environ["LOCAL_RANK"] == "0":
        logger.watch(module, log_freq=1, log_graph=False)
    run = trainer(
        devices=STAGES,
        strategy=GPipeStrategy(3),
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
    )
    run.fit(module)
    if run.is_global_zero:
        wandb.finish()


def exported(folder: Path) -> None:
    """After the Trainer the whole model is on rank 0, where it can be traced and exported."""
    assert run_ranks(_export, STAGES, str(folder)) == [True, None]


def _export(folder: str) -> bool | None:
    module = Example()
    run = trainer(devices=STAGES, strategy=GPipeStrategy(3), max_epochs=1)
    run.fit(module)
    if not run.is_global_zero:
        return None
    example = module.example_input_array
    scripted: Any = module.to_torchscript(method="trace", example_inputs=example)
    return bool(torch.equal(scripted(example), module(example)))


def attributes(folder: Path) -> None:
    first, last = run_ranks(_attributes, STAGES)
    common = (STAGES, 1, 3, (3, 3))
    assert first == (0, False, *common)
    assert last == (1, True, *common)


def _attributes() -> Any:
    strategy = GPipeStrategy(3)
    trainer(devices=STAGES, strategy=strategy, max_epochs=1).fit(Module())
    assert strategy.partition is not None
    sizes = strategy.partition.sizes
    return (
        *(strategy.stage, strategy.is_last, strategy.stages),
        *(strategy.replicas, strategy.chunks, sizes),
    )


def tuned(run: L.Trainer, module: Any, folder: Path) -> Any:
    module.lr = 1e-3
    found: Any = Tuner(run).lr_find(module, num_training=6, update_attr=False)
    return found.results["loss"]


class Rate(Module):
    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


ROWS: Rows = {
    "torch.optim.ASGD": optimizer("ASGD"),
    "torch.optim.Adadelta": optimizer("Adadelta"),
    "torch.optim.Adafactor": optimizer("Adafactor"),
    "torch.optim.Adagrad": optimizer("Adagrad"),
    "torch.optim.Adam": optimizer("Adam", amsgrad=True),
    "torch.optim.AdamW": optimizer("AdamW", fused=True),
    "torch.optim.Adamax": optimizer("Adamax"),
    "torch.optim.LBFGS": Refused(
        "LBFGS needs all parameters",
        module=stepped_by(lambda module: torch.optim.LBFGS(module.parameters())),
    ),
    "torch.optim.Muon": Row(module=stepped_by(muon))
    if hasattr(torch.optim, "Muon")
    else Shown(lambda folder: pytest.skip("PyTorch has it from 2.9 on")),
    "torch.optim.NAdam": optimizer("NAdam"),
    "torch.optim.RAdam": optimizer("RAdam"),
    "torch.optim.RMSprop": optimizer("RMSprop"),
    "torch.optim.Rprop": optimizer("Rprop"),
    "torch.optim.SGD": optimizer("SGD", momentum=0.9, nesterov=True),
    "torch.optim.SparseAdam": Refused(
        "has a sparse gradient", module=stepped_by(sparse_adam, Sparse)
    ),
    "several parameter groups": Row(module=stepped_by(groups)),
    "scheduler by step": Row(module=stepped_by(scheduled("step")), also=rates),
    "scheduler by epoch": Row(module=stepped_by(scheduled("epoch")), also=rates),
    "scheduler by plateau": Row({"max_epochs": 3}, stepped_by(plateau), also=rates),
    "manual optimization": Row(module=Manual, per_micro_batch="Manual optimization"),
    "CombinedLoader": Row(module=Combined, per_micro_batch="calls the backbone twice"),
    "several val loaders": Row(module=Several),
    "IterableDataset without length": Row(module=Stream),
    "dataloader_iter": Row(module=ReadsItself),
    "workers": Row(module=Workers),
    "torchmetrics": Row(module=Metrics),
    "all_gather": Row(module=Gathered),
    "clip_gradients": Row(module=Clipped),
    "strategy.clip_grad_norm_": Row(module=ByStrategy),
    "strategy.gathered": Row(module=Gathers),
    "strategy.grad_norm": Row(module=Clipped),
    "Lightning's grad_norm": Row(module=Norms),
    "strategy.stage": Shown(attributes),
    "freeze": Row(module=Partly),
    "save_hyperparameters": Row(module=Hyper, also=reloaded),
    "example_input_array": Row({"enable_model_summary": True}, Example),
    "strict_loading": Row(module=Loose, also=resumed),
    "to_torchscript": Shown(exported),
    "torch.compile of layers": Row(module=Compiled),
    "torch.compile of the module": Refused(
        "Using a compiled model is incompatible",
        module=lambda: cast(L.LightningModule, torch.compile(Module(), backend="eager")),
    ),
    "torch.compile of the backbone": Refused("compiled as a whole", module=Whole),
    "Tuner.lr_find": Row(module=Rate, also=tuned),
    "SyncBatchNorm": Refused("needs GPUs", module=Synchronized),
    "wandb.watch": Shown(watched),
    'wandb.watch(log="all")': Refused("give it log='gradients'", module=Watched),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)


def test_every_optimizer_has_a_row() -> None:
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    missing = names - {name.removeprefix("torch.optim.") for name in ROWS}
    assert missing == {"Optimizer"}
