"""What steps that run once per micro-batch tell: as those of a plain Trainer, on every rank."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.engine.executor import Executor
from tests import step_models as models
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Tells(models.Language):
    """Logs in every way Lightning has."""

    def build(self) -> None:
        super().build()
        self.accuracy = MulticlassAccuracy(models.VOCABULARY)
        self.several = torchmetrics.MetricCollection(
            {
                "micro": MulticlassAccuracy(models.VOCABULARY, average="micro"),
                "f1": MulticlassF1Score(models.VOCABULARY),
            }
        )
        self.perplexity = Perplexity()
        self.tracker = torchmetrics.MetricTracker(
            MulticlassAccuracy(models.VOCABULARY, average="micro")
        )
        self.called = self.several.clone(prefix="called_")
        self.loss_so_far = torchmetrics.MeanMetric()
        self.by_name = self.several.clone(prefix="by_name_")
        self.mean = torchmetrics.MeanMetric()
        self.given = MulticlassF1Score(models.VOCABULARY)
        self.given_together = self.several.clone(prefix="given_", postfix="_together")
        self.losses: list[Tensor] = []
        self.rows: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict(
            {"twice": 2 * loss, "size": logits.abs().mean()}, on_step=False, on_epoch=True
        )
        self.log("low", logits.min(), reduce_fx="min", on_epoch=True)
        self.log("high", logits.max(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("count", float(len(tokens)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("constant", 3)
        self.log("sized", loss, batch_size=len(tokens), on_epoch=True, sync_dist=True)
        self.accuracy(logits.flatten(0, 1), targets.flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        f1 = self.given(logits.flatten(0, 1), targets.flatten())
        self.log("given", f1, on_step=True, on_epoch=True)
        self.log_dict(self.given_together(logits.flatten(0, 1), targets.flatten()), on_epoch=True)
        self.mean.update(loss)
        self.loss_so_far(loss)  # with its graph
        self.log("loss_so_far", self.loss_so_far, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.losses.append(loss.detach())
        mean = logits.detach().mean()
        return {"loss": loss, "predicted": logits.argmax(-1), "n": len(tokens), "mean": mean}

    def on_train_epoch_end(self) -> None:
        self.log("losses", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        self.by_name["micro"](logits.flatten(0, 1), targets.flatten())
        self.log("by_name", self.by_name["micro"])
        called = self.called(logits.flatten(0, 1), targets.flatten())
        self.log_dict(self.called)
        self.log("one of them", called["called_micro"])
        self.log("given_f1", self.given(logits.flatten(0, 1), targets.flatten()))
        self.tracker.update(logits.flatten(0, 1), targets.flatten())
        self.several.update(logits.flatten(0, 1), targets.flatten())
        self.log_dict(self.several)
        self.perplexity(logits, targets)
        self.log("perplexity", self.perplexity)
        self.rows.append(logits.argmax(-1))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.tracker.train()  # Lightning warns of modules in evaluation mode

    def on_validation_epoch_end(self) -> None:
        self.log("tracked", self.tracker.compute())
        self.log("best", float(self.tracker.best_metric()))  # type: ignore[arg-type]
        self.log("predicted", torch.cat(self.rows).double().mean())
        self.rows.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"p": self(batch[0]).softmax(-1), "y": batch[1]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


class Watch(L.Callback):
    """Notes what callbacks are given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append({**outputs, **{k: v.clone() for k, v in trainer.callback_metrics.items()}})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append({"outputs": outputs})


def told(stages: int, folder: str) -> dict[str, Any]:
    """Train and predict; with no stages, a plain Trainer."""
    watch, stop = Watch(), EarlyStopping("val_loss", stopping_threshold=0.5)
    files = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2)
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    run = trainer(
        max_epochs=6,
        callbacks=[watch, stop, files],
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        **options,
    )
    module = Tells()
    run.fit(module)
    metrics = dict(run.callback_metrics)
    predicted = run.predict(module, DataLoader(module.data(), batch_size=12))
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    names = sorted(Path(path).name for path in files.best_k_models)
    return {
        "seen": watch.seen,
        "metrics": metrics,
        "predicted": predicted,
        "epochs": run.current_epoch,
        "files": names,
        "rates": rates,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, told(0, str(folder))


@pytest.mark.parametrize("stages", [1, 3])
def test_as_a_plain_trainers(stages: int, plain: Any, tmp_path: Path) -> None:
    folder, expected = plain
    assert 1 < expected["epochs"] < 6, "early stopping stops it"
    for found in run_ranks(told, stages, stages, str(tmp_path)):
        assert found.pop("files") == expected["files"]
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    rows = [(path / "metrics.csv").read_text().splitlines() for path in (folder, tmp_path)]
    assert len(rows[0]) == len(rows[1])
    for ours, theirs in zip(*rows, strict=True):
        for a, b in zip(ours.split(","), theirs.split(","), strict=True):
            assert a == b or float(a) == pytest.approx(float(b), rel=1e-6, abs=1e-6)


class Padded(models.Language):
    """Logs means over tokens that are no padding; some micro-batches have nothing else."""

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        lengths = tokens[:, :1] % models.LENGTH
        targets = targets.masked_fill(torch.arange(models.LENGTH) >= lengths, -100)
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        return {"loss": loss, "weight": (targets != -100).sum()}

    def data(self) -> Any:
        data = super().data()
        tokens = data.tensors[0]
        tokens[: len(tokens) // 2 // 12 * 12].unflatten(0, (-1, 12))[:, :3, 0] = 0
        return data

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("by_weight", loss["loss"])
        self.log("by_size", loss["loss"], batch_size=loss["weight"])
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("tested", loss["loss"], batch_size=loss["weight"])


def logged(stages: int) -> list[Any]:
    """What a validation and a test log; with no stages, by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    module, run = Padded(), trainer(max_epochs=1, **options)
    loader = DataLoader(module.data(), batch_size=12)
    return [run.validate(module, loader, verbose=False), run.test(module, loader, verbose=False)]


@pytest.mark.parametrize("stages", [1, 2])
def test_means_over_tokens(stages: int) -> None:
    """A micro-batch counts by the weight that the step returns, or the batch size of the log."""
    expected = logged(0)
    for found in run_ranks(logged, stages, stages):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Aggregates(models.Language):
    """Gives metrics a scalar in each step; the last batch has uneven micro-batches."""

    def build(self) -> None:
        super().build()
        names = "loss", "sum", "updated", "counted", "weighted", "share"
        self.means = torch.nn.ModuleDict({name: torchmetrics.MeanMetric() for name in names})
        names = "losses", "samples", "steps", "correct", "scaled", "weighed", "batchmean"
        self.sums = torch.nn.ModuleDict({name: torchmetrics.SumMetric() for name in names})
        self.largest, self.highest = torchmetrics.MaxMetric(), torchmetrics.MaxMetric()
        self.lowest, self.kept = torchmetrics.MinMetric(), torchmetrics.CatMetric()
        together = {"mean": torchmetrics.MeanMetric(), "sum": torchmetrics.SumMetric()}
        self.together = torchmetrics.MetricCollection(dict(together), prefix="all_")
        self.updated = torchmetrics.MetricCollection(copy.deepcopy(together), postfix="_updated")
        self.tracked = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        collection = torchmetrics.MetricCollection(copy.deepcopy(together))
        self.tracked_together = torchmetrics.MetricTracker(collection, maximize=[True, False])

    def on_train_epoch_start(self) -> None:
        self.tracked.increment()
        self.tracked_together.increment()

    def measure(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self(tokens).flatten(0, 1)
        loss = functional.cross_entropy(logits, targets.flatten())
        correct = logits.argmax(-1) == targets.flatten()
        n = len(tokens)
        self.means["loss"](loss)
        self.means["sum"](0.5 * loss + logits.square().mean() / 4)
        self.means["updated"].update(loss.detach())
        self.means["counted"](correct.sum())
        self.means["weighted"].update(loss, weight=n)
        self.means["share"](correct.float().mean())
        self.sums["losses"](loss)
        self.sums["losses"](loss)
        self.sums["samples"](n)
        self.sums["steps"](1)
        self.sums["correct"].update(correct.sum())
        self.sums["scaled"](loss * n)
        self.sums["weighed"](loss.detach() * float(n))
        shares = logits.softmax(-1).view(n, -1)
        apart = functional.kl_div(logits.view(n, -1), shares, reduction="batchmean")
        self.sums["batchmean"](apart)
        self.largest(loss)
        self.highest(logits.max())
        self.lowest(-loss.detach().double())
        self.kept.update(loss)
        self.log_dict(self.together(loss), on_step=True, on_epoch=True, batch_size=n)
        self.updated.update(loss)
        self.log_dict(self.updated, on_step=False, on_epoch=True)
        if self.training:
            self.tracked(loss)
            self.tracked_together.update(loss)
        for kind in ("means", "sums"):
            for name, metric in getattr(self, kind).items():
                is_called = name not in ("updated", "weighted", "correct")
                self.log(f"{kind}_{name}", metric, on_step=is_called, on_epoch=True)
        self.log_dict({"largest": self.largest, "highest": self.highest, "lowest": self.lowest})
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.measure(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def on_train_epoch_end(self) -> None:
        self.log("kept", self.kept.compute().square().mean())
        self.kept.reset()
        self.log("tracked", self.tracked.compute())
        for name, value in self.tracked_together.compute().items():
            self.log(f"tracked_{name}", value)

    def data(self) -> Any:
        return torch.utils.data.Subset(super().data(), range(12 + 9))


def aggregated(stages: int, virtual: int = 1) -> Any:
    """What the metrics give; with no stages, by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, virtual_stages=virtual, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    watch, module = Watch(), Aggregates()
    run = trainer(max_epochs=2, callbacks=[watch], check_val_every_n_epoch=9, **options)
    loader = DataLoader(module.data(), batch_size=12)
    run.fit(module, loader)
    told = dict(run.callback_metrics)
    validated = run.validate(module, loader, verbose=False)
    return watch.seen, told, validated


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 2), (3, 1)])
def test_metrics_that_are_given_a_scalar(stages: int, virtual: int) -> None:
    """They are given the mini-batch's, once."""
    expected = aggregated(0)
    for found in run_ranks(aggregated, stages, stages, virtual):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Made(models.Language):
    """Makes metrics in hooks, anew in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.mean = torchmetrics.MeanMetric()
        self.measures = torch.nn.ModuleDict({"sum": torchmetrics.SumMetric()})

    def on_validation_epoch_start(self) -> None:
        self.validated = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss)
        self.measures["sum"](loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated(self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.log_dict({"mean": self.mean.compute(), "sum": self.measures["sum"].compute()})

    def on_validation_epoch_end(self) -> None:
        self.log("validated", self.validated.compute())


def made(stages: int) -> Any:
    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(4, step="micro-batch")}
    run = trainer(max_epochs=3, **options)
    run.fit(Made())
    return dict(run.callback_metrics)


@pytest.mark.parametrize("stages", [1, 2])
def test_metrics_that_hooks_make(stages: int) -> None:
    expected = made(0)
    for found in run_ranks(made, stages, stages):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Scaled(models.Language):
    """Gets a number per token from the loader, as many as a batch has samples."""

    batch_size = models.LENGTH

    def loss(self, batch: Any) -> Any:
        tokens, targets, scales = batch
        logits = self(tokens) * (scales[:, None] if len(scales) == tokens.shape[1] else 1)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def train_dataloader(self) -> Any:
        each = [(*batch, self.scales) for batch in super().train_dataloader()]
        return DataLoader(each, batch_size=None)


def test_a_tensor_for_all_samples_that_is_split_is_told_of() -> None:
    for scales in torch.arange(6.0), torch.ones(6), torch.arange(6.0)[None]:
        module = Scaled()
        module.scales = scales
        strategy = GPipeStrategy(3, step="micro-batch")
        run = trainer(devices=1, strategy=strategy, max_steps=3, limit_val_batches=0)
        if scales.shape == (6,) and scales.std():
            with pytest.warns(UserWarning, match=r"shape \(6,\) is the same in the first two"):
                run.fit(module)
        else:
            run.fit(module)


class Pairs(models.Language):
    """Batches of two parts."""

    rows: tuple[int, ...] = ()

    def loss(self, batch: Any) -> Any:
        return super().loss(batch[0]) + batch[1].mean()

    def train_dataloader(self) -> Any:
        batches = zip(super().train_dataloader(), self.rows, strict=False)
        each = [(batch, torch.randn(rows, 3)) for batch, rows in batches]
        return DataLoader(each, batch_size=None)


@pytest.mark.parametrize("rows", [(9, 9, 9), (4, 4, 6)])
def test_samples_that_every_micro_batch_gets_are_told_of(rows: tuple[int, ...]) -> None:
    module = Pairs()
    module.rows = rows
    strategy = GPipeStrategy(3, step="micro-batch")
    run = trainer(devices=1, strategy=strategy, max_steps=3, limit_val_batches=0)
    with pytest.warns(UserWarning, match="is another one in each batch, and hasn't a row for each"):
        run.fit(module)


def test_parts_of_a_batch_that_differ_once_are_refused() -> None:
    module = Pairs()
    module.rows = (len(next(iter(models.Language().train_dataloader()))[0]),) * 2 + (5,)
    strategy = GPipeStrategy(3, step="micro-batch")
    run = trainer(devices=1, strategy=strategy, max_steps=3, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"batch\[1\] has 5 rows .* In batches before"):
        run.fit(module)


class LogsByConstant(models.Language):
    """Says how large its batches are, as the loader makes them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=7)
        return loss


def test_a_loader_s_batch_size_weighs_by_samples() -> None:
    values = []
    for strategy in "auto", GPipeStrategy(3, step="micro-batch"):  # of 3, 2 and 2 samples
        torch.manual_seed(2)
        module = LogsByConstant()
        run = trainer(devices=1, strategy=strategy, max_steps=1)
        run.fit(module, DataLoader(module.data(), batch_size=7))
        values.append(run.callback_metrics["loss"])
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


class LogsNumbers(models.Language):
    """Logs a number that float32 would round."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("share", 0.1)
        return self.loss(batch)


def test_numbers_are_logged_in_the_type_of_the_step() -> None:
    strategy = GPipeStrategy(3, step="micro-batch")
    run = trainer(devices=1, strategy=strategy, max_steps=1, precision="64-true")
    run.fit(LogsNumbers())
    assert run.callback_metrics["share"].dtype == torch.float64
    assert float(run.callback_metrics["share"]) == 0.1


class Reads(models.Language):
    """Reads a value in the step that another stage has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.item())
        return loss


class Selects(models.Language):
    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        chosen = logits[..., 0] > 0
        return functional.cross_entropy(logits[chosen], targets[chosen])


class Twice(models.Language):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(self.backbone(self.embed(tokens))))
        return logits


class Sometimes(models.Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return self.head.weight.sum()
        return self.loss(batch)


class SometimesWeighted(models.Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        is_first = int(batch[0][0, 0]) == int(self.data()[0][0][0])
        return {"loss": loss, "weight": 2.0} if is_first else loss


class Windowed(models.Language):
    """Keeps a metric of the last mini-batches."""

    def build(self) -> None:
        super().build()
        self.recent = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=2)


class Together(models.Language):
    """Gives a mean and a maximum the same number, of which nothing is known."""

    def build(self) -> None:
        super().build()
        of = {"mean": torchmetrics.MeanMetric(), "most": torchmetrics.MaxMetric()}
        self.measures = torchmetrics.MetricCollection(of)

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.measures.update(loss.exp())
        return loss


class Each(models.Language):
    """Returns the losses of all tokens."""

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self(tokens).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Nothing(models.Language):
    """Skips a mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Nameless(models.Language):
    """Returns no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"error": super().training_step(batch, batch_idx)}


class Penalised(models.Language):
    """Has a penalty on the gradient of the loss in a part of the step."""

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.training:
            loss = loss + torch.autograd.grad(loss, logits, create_graph=True)[0].square().mean()
        return loss


class SampleBySample(models.Language):
    """Computes the loss of each sample in a function transform."""

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        return torch.vmap(functional.cross_entropy)(self(tokens), targets).mean()


REFUSED = {
    Each: r"The loss has the shape \(18,\), and only a scalar can be trained by",
    Nothing: "returned no loss.*no micro-batch can be skipped",
    Nameless: "the 'loss' key needs to be present",
    Penalised: r"'grad' reads a value of the step that stage 1 has.*supported by neither",
    SampleBySample: "'cross_entropy' failed inside a function transform.*mini-batch",
    Together: "A MetricCollection of MeanMetric, MaxMetric is given a number.*one by one",
    Windowed: "Running counts updates.*mini-batch",
    SometimesWeighted: "returned a weight for some micro-batches and none for others",
    Reads: "'item' reads a value of the step that stage 1 has.*in on_train_batch_end",
    Selects: "'__getitem__' reads a value.*of the batch alone.*targets of -100 there",
    Twice: "calls the backbone twice.*mini-batch.*in a hook",
    Sometimes: "doesn't call the backbone for micro-batch 0",
}


class Manual(models.Language):
    automatic_optimization = False


class OwnBackward(models.Language):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class BackwardOfInstance(models.Language):
    def __init__(self) -> None:
        super().__init__()
        self.backward = lambda loss: loss.backward()  # type: ignore[method-assign]


class ReadsItself(models.Language):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


BEFORE: dict[type[models.Language], str] = {
    ReadsItself: r"training_step\(self, dataloader_iter\) reads its batches itself.*mini-batch",
    BackwardOfInstance: "BackwardOfInstance overrides backward",
    Manual: "Manual optimization runs backwards inside the step.*step='mini-batch'",
    OwnBackward: "OwnBackward overrides backward",
}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize("kind", BEFORE)
def test_refusals_before_training(kind: type[models.Language]) -> None:
    with pytest.raises(ValueError, match=BEFORE[kind]):
        trainer(devices=1, strategy=GPipeStrategy(4, step="micro-batch"), max_steps=1).fit(kind())


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no")
def test_a_step_that_is_none_is_left_out() -> None:
    module = models.Language()
    module.validation_step = None  # type: ignore[method-assign, assignment]
    run = trainer(devices=1, strategy=GPipeStrategy(4, step="micro-batch"), max_steps=1)
    run.fit(module)
    assert run.global_step == 1


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="step must be one of 'mini-batch', 'micro-batch'"):
        GPipeStrategy(step="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule must be one of 'auto', 'fill_drain'"):
        GPipeStrategy(schedule="2f2b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give step='micro-batch', too"):
        GPipeStrategy(schedule="1f1b")
    with pytest.raises(ValueError, match="counts the buckets of one reducer"):
        GPipeStrategy(step="micro-batch", ddp_comm_state=object())


class OneElement(models.Language):
    """Returns a loss that has dimensions."""

    shape: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx).reshape(self.shape)
        return loss if batch_idx % 2 else {"loss": loss}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    found = []
    for each in (), shape:
        module, strategy = OneElement(), GPipeStrategy(4, step="micro-batch")
        module.shape = each
        trainer(devices=1, strategy=strategy, max_steps=3).fit(module)
        found.append(module.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def refused(kind: type[models.Language]) -> None:
    strategy = GPipeStrategy(4, step="micro-batch")
    trainer(devices=2, strategy=strategy, max_steps=3).fit(kind())


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: type[models.Language]) -> None:
    with pytest.raises(RankError, match=f"(?s){REFUSED[kind]}"):
        run_ranks(refused, 2, kind)


SEEN = {"samples": 0}


class Sizes:
    """What a user's object keeps of batches."""

    def __init__(self) -> None:
        self.latest, self.samples = deque[int](maxlen=100), 0
        self.tensor, self.array = torch.zeros(()), numpy.zeros(1)

    def add(self, samples: int) -> None:
        self.latest.append(samples)
        self.samples += samples
        self.tensor += samples
        self.array += samples

    def all(self) -> list[float]:
        return [sum(self.latest), self.samples, float(self.tensor), float(self.array[0])]


class Counts(models.Language):
    """Counts its steps, before it calls the backbone."""

    def build(self) -> None:
        super().build()
        self.steps, self.seen = 0, []  # type: ignore[var-annotated]
        self.samples, self.sizes, self.metric = torch.zeros(()), Sizes(), torchmetrics.SumMetric()
        self.classes = torchmetrics.ConfusionMatrix("multiclass", num_classes=300)

    def loss(self, batch: Any) -> Any:
        samples = len(batch[0])
        self.steps += 1
        self.seen.append(samples)
        self.samples += samples
        self.sizes.add(samples)
        self.metric.update(torch.ones(samples))
        self.classes.update(*torch.ones(2, samples, dtype=torch.int64))
        SEEN["samples"] += samples
        return super().loss(batch)


def counts(stages: int) -> tuple[int, list[int], list[float]]:
    module, strategy = Counts(), GPipeStrategy(4, stages=stages, step="micro-batch")
    before = SEEN["samples"]
    run = trainer(max_steps=3, limit_val_batches=0, devices=stages, strategy=strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step changes")
        run.fit(module)
    metrics = [float(module.metric.sum_value), float(module.classes.confmat.sum())]
    counted = [float(module.samples), SEEN["samples"] - before]
    return module.steps, module.seen, [*counted, *module.sizes.all(), *metrics]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_runs_once_for_each_micro_batch(stages: int) -> None:
    """What it has done before, to reach the backbone, is taken back."""
    assert run_ranks(counts, stages, stages) == [(12, [3] * 12, [36] * 8)] * stages


class Samples(models.Tied):
    """Calls the model in hooks, outside of steps."""

    def build(self) -> None:
        super().build()
        self.samples: list[list[int]] = []
        self.scores: list[float] = []

    def on_train_epoch_end(self) -> None:
        self.eval()
        tokens = torch.arange(models.LENGTH)[None] % models.VOCABULARY
        with torch.no_grad():
            for _ in range(3):
                following = self(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens[:, 1:], following], dim=1)
        self.samples.append(tokens[0].tolist())
        self.train()

    def on_validation_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        self.scores.append(float(self(batch[0]).double().sum()))


def samples(stages: int) -> Any:
    module = Samples()
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, step="micro-batch")
        options = {"devices": stages, "strategy": strategy}
    run = trainer(max_epochs=3, **options)
    run.fit(module)
    run.validate(module)
    return module.samples, module.scores


@pytest.mark.parametrize("stages", [1, 3])
def test_models_are_called_in_hooks(stages: int) -> None:
    expected = samples(0)
    assert len(expected[0]) == 3
    for found in run_ranks(samples, stages, stages):
        torch.testing.assert_close(found, expected)


class Wide(models.Language):
    """Returns more than the last stage tells while its backwards are to come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rows = batch[0].double().repeat(1, self.repeats) * loss.detach()
        return {"loss": loss, "rows": rows}

    repeats = 1


class Rows(L.Callback):
    """Keeps what steps return."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
        self.rows.append(outputs["rows"].clone())


def ordered(repeats: int, schedule: Any) -> tuple[list[str], list[Tensor]]:
    """In which order this rank tells and computes, and what its steps return."""
    broadcast, do = ObjectChannel.broadcast, Executor.do
    events: list[str] = []

    def noted(channel: ObjectChannel, kind: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "told" and value is not None:
            events.append(kind)
        return broadcast(channel, kind, value, *args, **kwargs)

    def done(executor: Executor, action: Any, *args: Any, **kwargs: Any) -> None:
        events.append(action.op)
        do(executor, action, *args, **kwargs)

    rows, module = Rows(), Wide()
    module.repeats = repeats
    strategy = GPipeStrategy(4, stages=2, step="micro-batch", checkpoint="never", schedule=schedule)
    run = trainer(devices=2, strategy=strategy, max_steps=4, callbacks=[rows])
    with patch.object(ObjectChannel, "broadcast", noted), patch.object(Executor, "do", done):
        run.fit(module)
    return events, rows.rows


@pytest.mark.parametrize("repeats", [1, 4000])
@pytest.mark.parametrize("schedule", ["searched", "fill_drain"])
def test_the_last_stage_tells_before_its_backwards_end(repeats: int, schedule: str) -> None:
    """Where that is little: nobody waits for it."""
    first, last = run_ranks(ordered, 2, repeats, schedule)
    events = last[0][len(last[0]) // 2 :]  # of the third and fourth step
    told = events.index("told")
    is_ahead = events[told + 1] in "BIW" if told + 1 < len(events) else False
    assert is_ahead == (repeats == 1)
    torch.testing.assert_close(first[1], last[1], rtol=0, atol=0)
    assert all(rows.shape[1] == repeats * models.LENGTH and rows.any() for rows in first[1])


class Kinds(models.Language):
    """Returns values without dimensions of several types, and others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        return {
            "loss": loss,
            "double": value.double(),
            "integer": (1e3 * value).long(),
            "truth": value > 0,
            "complex": torch.complex(value, 2 * value),
            "vector": value.repeat(3),
        }


class Outputs(L.Callback):
    """Keeps what steps return, and changes it in place."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, _: Any, module: Any, outputs: Any, *__: Any) -> None:
        self.found.append({name: value.clone() for name, value in outputs.items()})
        for name in ("double", "integer", "vector"):
            outputs[name].zero_()


def kinds(stages: int) -> list[dict[str, Tensor]]:
    outputs = Outputs()
    strategy = GPipeStrategy(1, stages=stages, step="micro-batch") if stages else "auto"
    devices = stages or 1
    trainer(devices=devices, strategy=strategy, max_steps=3, callbacks=[outputs]).fit(Kinds())
    return outputs.found


def test_values_of_every_type_are_told() -> None:
    expected = kinds(0)
    for found in run_ranks(kinds, 2, 2):
        torch.testing.assert_close(found, expected)


class LogsSteps(models.Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("latest", self.global_step, on_step=False, on_epoch=True, reduce_fx=max)
        return super().training_step(batch, batch_idx)


def test_whole_numbers_are_logged_as_a_plain_trainer_logs_them() -> None:
    """Lightning warns of tensors of whole numbers, not of numbers."""
    for options in {}, {"strategy": GPipeStrategy(4, step="micro-batch")}:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*needs to be floating.*")
            run = trainer(devices=1, max_steps=3, limit_val_batches=0, **options)
            run.fit(LogsSteps())
        assert run.callback_metrics["latest"] == 2
