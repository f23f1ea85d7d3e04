"""What steps make of metrics and of means, once per micro-batch, is that of the mini-batch."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.recipes import Mean, NoMean, mean_of
from tests.ranks import RankError, run_ranks
from tests.training import trainer

CLASSES = 5


class Told(L.Callback):
    """Keeps what is logged in each step, and what steps return."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        returned = {
            name: value.clone()
            for name, value in outputs.items()
            if isinstance(value, Tensor) and name != "loss"
        }
        self.seen.append({**trainer.callback_metrics, **returned})

    def on_validation_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        self.seen.append({"of validation": outputs.clone()})


class Hoard(torchmetrics.Metric):
    """Keeps what it is given in attributes that it doesn't declare as states."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.count, self.by_class = 0, dict[int, int]()
        self.largest: Tensor | None = None
        self.total = torch.zeros(())

    def update(self, scores: Tensor, targets: Tensor) -> None:
        self.rows.append(scores.detach())
        self.count += len(targets)
        self.total = self.total + targets.sum()
        for target in targets.tolist():
            self.by_class[target] = self.by_class.get(target, 0) + 1
        before = scores.amax() if self.largest is None else self.largest
        self.largest = torch.maximum(before, scores.amax().detach())

    def compute(self) -> Tensor:
        classes = sum(number * count for number, count in self.by_class.items())
        assert self.largest is not None
        return torch.cat(self.rows).norm() + self.count + classes + self.largest + self.total

    def reset(self) -> None:
        super().reset()
        self.rows, self.count, self.by_class, self.largest = [], 0, {}, None
        self.total = torch.zeros(())


class Classifier(L.LightningModule):
    """Its steps make something of metrics and of means."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(*(nn.Linear(CLASSES, CLASSES) for _ in range(4)))
        self.f1, self.often = MulticlassF1Score(CLASSES), MulticlassF1Score(CLASSES)
        self.each = MulticlassF1Score(CLASSES, average=None)
        self.named = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.several = torchmetrics.MetricCollection(
            {
                "f1": MulticlassF1Score(CLASSES),
                "named": torchmetrics.ClasswiseWrapper(
                    MulticlassAccuracy(CLASSES, average=None), prefix="class_"
                ),
            }
        )
        self.kept = torchmetrics.MetricCollection(
            {"auroc": torchmetrics.AUROC("multiclass", num_classes=CLASSES)}
        )
        self.table = torchmetrics.ConfusionMatrix("multiclass", num_classes=CLASSES)
        self.errors = torchmetrics.MeanSquaredError()
        self.hoard = Hoard()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        scores = self.backbone(inputs)
        loss = functional.cross_entropy(scores, targets)
        self.metrics(scores, targets)
        self.means(scores, inputs, loss)
        self.of_some(scores, inputs)
        given = self.each(scores, targets)
        self.hoard.update(scores, targets)
        return {"loss": loss, "each": given, "root": loss.sqrt()}

    def metrics(self, scores: Tensor, targets: Tensor) -> None:
        f1 = self.f1(scores, targets)
        self.log("percent", f1 * 100, on_step=True, on_epoch=True)
        self.log("plain", f1.detach().cpu())
        self.log("first", self.often(scores, targets))
        self.log("second", self.often(-scores, targets) / 2)
        for i, value in enumerate(self.each(scores, targets)):
            self.log(f"class {i}", value)
        self.log_dict({f"named {name}": v for name, v in self.named(scores, targets).items()})
        self.log_dict({f"several {n}": 2 * v for n, v in self.several(scores, targets).items()})
        self.log("auroc", self.kept(scores.softmax(1), targets)["auroc"] + 1)
        table = self.table(scores, targets)
        self.log("recall", (table.diag() / table.sum(1).clamp(min=1)).mean())
        self.log("both", torch.stack([f1, self.each(scores, targets).amax()]).mean())

    def of_some(self, scores: Tensor, inputs: Tensor) -> None:
        """Means over elements of which micro-batches have different numbers."""
        self.log("positive", scores[inputs > 0].mean(), on_step=True, on_epoch=True)
        few = inputs > 1.9  # of which some micro-batches, and none of the mini-batches, have none
        self.log("of few", (scores[few] > 0).double().mean())
        by_class = [scores[inputs > i].mean() for i in range(4)]
        self.log("of classes", torch.stack(by_class).nanmean())
        short = inputs.argmax(1).masked_fill(inputs[:, 0] > 0, -100)
        self.log("padded", functional.cross_entropy(scores, short), on_step=True, on_epoch=True)
        of_class = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
        self.log("by class", functional.cross_entropy(scores, inputs.argmax(1), of_class))
        total = torch.zeros((), dtype=torch.float64)
        for row in scores:
            total += row.abs().max() + row.square().mean()
        self.log("one by one", total / len(scores))

    def means(self, scores: Tensor, inputs: Tensor, loss: Tensor) -> None:
        error = functional.mse_loss(scores, inputs)
        self.log("root", error.sqrt(), on_step=True, on_epoch=True)
        self.log("perplexity", torch.exp(loss.detach()))
        self.log("deviation", (scores.square().mean() - scores.mean() ** 2).sqrt())
        self.log("ratio", error / loss)
        self.log("mean of roots", torch.stack([error.sqrt(), loss.sqrt()]).mean())
        self.log("mixed", (self.errors(scores, inputs) + loss).sqrt())
        self.log("explained", 1 - error / inputs.square().mean())
        self.log("relative", self.errors(scores, inputs) / inputs.abs().mean())
        self.log("sum", loss * len(scores), reduce_fx="sum")
        for name in "max", "min", "sum":
            self.log(f"{name} of roots", error.sqrt(), reduce_fx=name)
        total = torch.zeros(())
        total += loss.detach()
        self.log("after", self.f1(scores, scores.argmax(1)).sqrt())

    def on_train_epoch_end(self) -> None:
        self.log("hoarded", self.hoard.compute())
        self.hoard.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.backbone(batch[0])
        self.log("validated", functional.mse_loss(scores, batch[0]).sqrt())
        found: Tensor = 10 * self.f1(scores, batch[1])
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(12 * 2 + 9, CLASSES, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, CLASSES, (len(inputs),), generator=generator)
        return DataLoader(TensorDataset(inputs, targets), batch_size=12)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def told(kind: type[Classifier], stages: int, virtual: int = 1, replicas: int = 1) -> Any:
    """What a module tells; with no stages, by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, virtual_stages=virtual, step="micro-batch")
        options = {"devices": stages * replicas, "strategy": strategy}
    seen = Told()
    run = trainer(max_epochs=2, callbacks=[seen], num_sanity_val_steps=0, **options)
    run.fit(kind())
    return seen.seen, dict(run.callback_metrics)


@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")
@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 2), (3, 1)])
def test_values_are_the_mini_batchs(stages: int, virtual: int) -> None:
    expected = told(Classifier, 0)
    assert len(expected[1]) > 30
    for found in run_ranks(told, stages, Classifier, stages, virtual):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Penalised(Classifier):
    """Logs what it makes of weights behind the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.head(self.backbone(batch[0]))
        penalty = sum(weight.square().sum() for weight in self.head.parameters())
        loss = functional.cross_entropy(scores, batch[1])
        self.log("share", penalty.detach() / (loss.detach() + 3))
        return loss + 0.01 * penalty

    def on_train_epoch_end(self) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(batch[0])


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_computed_of_weights_of_one_stage(stages: int) -> None:
    expected = told(Penalised, 0)
    assert "share" in expected[1]
    for found in run_ranks(told, stages, Penalised, stages):
        torch.testing.assert_close(found, expected)


class MixesIn(Classifier):
    """Logs what can't be computed of the mini-batch's values."""

    what = "largest"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        scores = self.backbone(inputs)
        f1 = self.f1(scores, targets)
        values = {
            "largest": lambda: f1 + scores.amax(),
            "changed": lambda: f1.view(1).mul_(2),
            "some": lambda: f1 if targets[0] % 2 else torch.zeros(()),
            "random": lambda: f1.bernoulli(),
        }
        value = values[self.what]()
        self.log("value", f1 if self.what == "changed" else value)
        return {"loss": functional.cross_entropy(scores, targets)}

    def on_train_epoch_end(self) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.backbone(batch[0])


@pytest.mark.parametrize("what", ["largest", "changed", "some", "random"])
def test_means_over_micro_batches_of_a_metric_are_told_of(what: str) -> None:
    kind = type("Mixes", (MixesIn,), {"what": what})
    with pytest.warns(UserWarning, match=r"What self.log\('value', ...\) logs is the mean over"):
        told(kind, 1)


class Validates(Classifier):
    """Logs what is made of all samples at once."""

    what = "psnr"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.backbone(batch[0]), batch[0])

    def on_train_epoch_end(self) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        scores = self.backbone(inputs)
        error, errors = functional.mse_loss(scores, inputs), (scores - inputs).square()
        mask = inputs > 0
        values = {
            "psnr": lambda: 20 * torch.log10(inputs.max() / error.sqrt()),
            "largest": lambda: (scores - inputs).abs().max(),
            "deviation": lambda: scores.std() + error,
            "norm": lambda: torch.linalg.vector_norm(scores),
            "median": lambda: (scores - inputs).square().sum(1).median(),
            "any": lambda: (scores.argmax(1) == targets).any().double(),
            "every class": lambda: (scores > inputs).all(0).double().mean(),
            "every class of a sample": lambda: (scores > inputs).any(1).double().mean(),
            "by rows": lambda: torch.stack([(row.max() - row.min()) for row in scores]).mean(),
            "by samples": lambda: scores.amax(1).mean(),
            "of weights": lambda: torch.ones(4, CLASSES).norm(),
            "masked": lambda: (errors * mask).sum() / mask.sum(),
            "by number": lambda: errors.sum().div(int(mask.sum())),
            "halved": lambda: errors.sum() / 2,
            "by another's count": lambda: torch.where(
                mask.sum() > 6, errors.sum() / mask.sum(), 0.0
            ),
            "by whether there is one": lambda: errors.sum() / (mask.sum() > 0),
            "where there are others": lambda: torch.where(
                (inputs > 1.9).sum() != 0, errors.sum() / mask.sum(), 0.0
            ),
            "of bounded": lambda: (errors * mask).sum() / mask.sum().clamp(min=6),
            "of others": lambda: errors.sum() / (inputs > 1.9).sum().clamp(min=1),
            "of nothing": lambda: errors.sum() / (inputs > 99).sum().clamp(min=1),
            "of fractions": lambda: errors.sum() / (inputs * 0 + 0.01).sum().clamp(min=1),
            "explained": lambda: 1 - errors.sum() / ((inputs - inputs.mean(0)) ** 2).sum(),
            "by targets": lambda: (2 * errors).sum() / (targets * (inputs[:, 0] > 1)).sum(),
            "overlap": lambda: (errors.sum(0) / (scores.abs() + 1).sum(0)).mean(),
            "sum": lambda: functional.mse_loss(scores, inputs, reduction="sum") + error,
            "times samples": lambda: error * len(inputs),
            "times tokens": lambda: mask.sum() * error,
            "root": lambda: error.sqrt(),
            "one by one": lambda: sum(row.abs().max() for row in scores),
            "one by one and more": lambda: (
                (sum(row.abs().max() for row in scores) + error) / len(scores)
            ),
            "times a number": lambda: error * float(inputs.numpy().mean()),
            "otherwise": lambda: error.exp() if inputs[0, 0] > 0 else error.sqrt(),
            "of a metric and a number": lambda: self.f1(scores, targets) * float(inputs.sum()),
            "but nothing": lambda: torch.where(mask, errors, torch.nan).nanmean(),
            "count": lambda: 2 * (scores > inputs).sum().float(),
            "counts": lambda: (errors * mask).sum(0).mean(),
            "returned count": lambda: error,
            "with a penalty": lambda: error + torch.ones(6, 2).square().sum(),
            "by samples' number": lambda: errors.sum() / len(inputs),
            "by elements": lambda: errors.sum() / torch.ones_like(scores).sum(),
            "by columns": lambda: (errors.sum(0) / len(inputs)).mean(),
            "by a weight": lambda: errors.mean(1).sum() / torch.ones(()).exp(),
            "scaled": lambda: (scores / scores.abs().sum(1, keepdim=True)).square().mean(),
            "transposed": lambda: (scores.T / scores.T.abs().sum(0)).square().mean(),
        }
        what, _, reduction = self.what.partition(", ")
        if reduction:
            self.log("value", values[what](), reduce_fx=reduction)
        elif self.what == "by its divisor":
            self.log("value", values["masked"](), batch_size=int(mask.sum()))
        else:
            self.log("value", values[what]())
        return (scores > inputs).sum() if self.what == "returned count" else scores


def texts_of(what: str, stages: int = 1, kind: type[Validates] = Validates) -> list[str]:
    """What a run warns of that logs it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        told(type("Validates", (kind,), {"what": what}), stages)
    texts = [str(each.message) for each in found]
    return [text for text in texts if "over micro-batches of" in text]


@pytest.mark.parametrize(
    "what",
    [
        *("psnr", "largest", "deviation", "norm", "median", "any", "every class"),
        *("sum", "count", "counts", "but nothing", "by another's count", "where there are others"),
        *("one by one", "one by one and more"),
    ],
)
def test_what_is_no_mean_is_told_of_once(what: str) -> None:
    (text,) = texts_of(what)
    assert "What self.log('value', ...) logs is the mean over micro-batches of what '" in text
    assert "makes of all samples of each" in text


@pytest.mark.parametrize(
    "what",
    [
        *("halved", "of bounded", "of others", "of nothing", "of fractions"),
        *("explained", "overlap", "by targets", "by whether there is one"),
        "by a weight",
    ],
)
def test_quotients_of_sums_are_told_of_once(what: str) -> None:
    (text,) = texts_of(what)
    assert "logs is the mean over micro-batches of quotients whose divisors aren't in" in text


@pytest.mark.parametrize("what", ["times a number", "otherwise"])
def test_what_micro_batches_compute_otherwise_is_told_of_once(what: str) -> None:
    (text,) = texts_of(what)
    assert (
        "over micro-batches of what is computed in another way, or with other numbers, in" in text
    )


def test_of_a_metric_that_each_micro_batch_scales_it_is_told_once() -> None:
    (text,) = texts_of("of a metric and a number")
    assert "over micro-batches of what a metric gives" in text


class AsManyFeatures(Validates):
    """Sums up features, of which there are as many as samples in some micro-batches alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores: Tensor = self.backbone(batch[0])
        shares = scores.softmax(1).mean(0)
        self.log("value", -(shares * shares.log()).sum())
        return scores

    def val_dataloader(self) -> Any:
        return DataLoader(super().val_dataloader().dataset, batch_size=4 * CLASSES - 2)


def test_what_may_be_a_sum_in_some_micro_batches_is_told_of() -> None:
    (text,) = texts_of("", kind=AsManyFeatures)
    assert "what 'sum' makes of all samples of each" in text


class Even(Validates):
    """All micro-batches have as many samples; a sum is divided by those of the mini-batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        scores = self.backbone(inputs)
        loss = functional.cross_entropy(scores, targets, reduction="sum")
        by = {
            "a number": lambda: 100 * (scores.argmax(1) == targets).sum() / 12,
            "a tensor": lambda: loss / torch.tensor(12.0),
            "classes": lambda: loss / len(targets.unique()),
            "those of the micro-batch": lambda: loss / len(inputs),
            "elements": lambda: (
                functional.mse_loss(scores, inputs, reduction="sum") / inputs.numel()
            ),
        }
        self.log("value", by[self.what]())
        return scores

    def val_dataloader(self) -> Any:
        return DataLoader(super().val_dataloader().dataset, batch_size=12, drop_last=True)


@pytest.mark.parametrize(
    ("what", "is_told"),
    [
        *(("a number", True), ("a tensor", True)),
        *(("those of the micro-batch", False), ("elements", False)),
    ],
)
def test_sums_divided_by_the_samples_of_a_mini_batch_are_told_of(what: str, is_told: bool) -> None:
    assert len(texts_of(what, kind=Even)) == is_told


class Once(Even):
    """Has one mini-batch, of whose micro-batches one has other numbers of classes."""

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(super().val_dataloader().dataset, range(12)), batch_size=12)


def test_a_number_of_classes_counts_nothing() -> None:
    (text,) = texts_of("classes", kind=Once)
    assert "quotients whose divisors aren't in proportion" in text


class Weighted(Validates):
    """Weights as many terms as a micro-batch has samples, as by their uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.Parameter(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.backbone(batch[0])
        terms = torch.stack([scores.mean(), scores.abs().mean(), scores.square().mean()])
        self.log("value", (torch.exp(-self.terms) * terms).sum() + self.terms.sum())
        return scores


@pytest.mark.filterwarnings("ignore:The first steps")
def test_a_sum_of_weighted_terms_is_the_mini_batchs() -> None:
    assert texts_of("", kind=Weighted) == []
    expected = told(Weighted, 0)
    for stages in (1, 2):
        for found in run_ranks(told, stages, Weighted, stages):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_divisors_of_another_stage_are_compared() -> None:
    assert [*map(len, run_ranks(texts_of, 2, "overlap", 2))] == [1, 0]
    assert run_ranks(texts_of, 2, "by columns", 2) == [[], []]


@pytest.mark.parametrize(
    "what",
    ["by rows", "by samples", "every class of a sample", "of weights"],
)
def test_nothing_is_told_of_what_may_be_a_mean(what: str) -> None:
    assert texts_of(what) == []


@pytest.mark.parametrize(
    "what",
    [
        *("largest, max", "times samples, sum", "times tokens, sum", "count, sum", "halved, sum"),
        *("root, max", "root, sum", "masked, min"),
    ],
)
def test_nothing_is_told_of_what_may_be_of_parts(what: str) -> None:
    assert texts_of(what) == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("largest, min", "the smallest over micro-batches of what 'max' makes"),
        ("largest, sum", "the sum over micro-batches of what 'max' makes"),
        ("count, max", "the largest over micro-batches of what 'sum' makes"),
        ("times samples, max", "the largest over micro-batches of what 'mul' makes"),
        ("times samples", "the mean over micro-batches of what 'mul' makes"),
        ("times tokens", "the mean over micro-batches of what 'mul' makes"),
        ("deviation, min", "the smallest over micro-batches of what 'std' makes"),
        ("explained, max", "the largest over micro-batches of quotients whose divisors"),
    ],
)
def test_other_reductions_of_what_is_of_all_samples_are_told_of(what: str, text: str) -> None:
    assert [text in told for told in texts_of(what)] == [True]


@pytest.mark.parametrize(
    "what",
    [
        "masked",
        "by number",
        "by samples' number",
        "by elements",
        "by columns",
        "with a penalty",
        "returned count",
        "by its divisor",
        "scaled",
        "transposed",
    ],
)
def test_nothing_is_told_of_quotients_that_are_means(what: str) -> None:
    assert texts_of(what) == []


class Padded(Classifier):
    """Validates by a mean over what isn't padding."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.arange(1, CLASSES + 1).double() / 3
        self.criterion = nn.CrossEntropyLoss(weight=self.counts)
        names = "left out", "root", "by size", "root by size", "by mask"
        means = {name: torchmetrics.MeanMetric() for name in names}
        self.averages = nn.ModuleDict(means).double()

    def metrics(self, scores: Tensor, targets: Tensor) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        scores = self.backbone(inputs)
        short = targets.masked_fill(targets < 2, -100)
        error = functional.mse_loss(scores, inputs)
        found = functional.cross_entropy(scores, short)
        self.log("left out", found.detach(), on_step=True, on_epoch=True)
        self.log("perplexity", functional.nll_loss(scores, targets, ignore_index=1).exp())
        self.log("both", found / 2 + error)
        self.quotients((scores > 0.3).long(), (inputs > 0).long(), inputs > -1)
        self.log("none", functional.cross_entropy(scores, targets))
        self.log("by name", functional.cross_entropy(input=scores, target=short).exp())
        self.log("by class", functional.cross_entropy(scores, short, self.counts))
        self.log("by class, too", self.criterion(scores, short).exp())
        logits, ones = scores.flatten(), (inputs > 0).double().flatten()
        weighted = functional.binary_cross_entropy_with_logits(logits, ones, weight=ones + 1)
        self.log("of elements", weighted.sqrt())
        self.chosen(scores, inputs, targets)
        self.averages["left out"].update(found)
        self.log("root", self.averages["root"](error.sqrt()))
        self.averages["by size"].update(found, len(inputs))
        by_size = self.averages["root by size"](error.sqrt(), weight=len(inputs))
        self.log("root by size", by_size)
        kept = inputs > 0
        self.averages["by mask"].update((scores * kept).sum() / kept.sum(), kept.sum())
        return found

    def chosen(self, scores: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Log means over elements, or over samples, that a mask chooses."""
        mask, some = inputs > 0, targets > 2
        self.log("chosen", (scores - inputs)[mask].abs().mean())
        self.log("in one column", scores[some, 1].mean() + scores.mean())
        self.log("selected", functional.l1_loss(scores.masked_select(mask), inputs[mask]).sqrt())
        self.log("of some", functional.cross_entropy(scores[some], targets[some]))

    def quotients(self, found: Tensor, expected: Tensor, kept: Tensor) -> None:
        """Log what counts by itself."""
        right = (found == expected).double()
        self.log("accuracy", (right * kept).sum() / kept.sum())
        self.log("root of it", ((right * kept).sum() / kept.sum()).sqrt())
        self.log("error", 1 - (right * kept).sum().div(int(kept.sum())))
        few = kept & (right.cumsum(1) > 2)
        self.log("of few", (right * few).sum() / few.sum().clamp(min=1))
        self.log("of none", (right * few * 0).sum() / (few * 0).sum().clamp_min(1e-8))
        both, either = (found * expected).sum(0), (found | expected).sum(0)
        self.log("overlap", (both / either).mean())
        for i, (one, other) in enumerate(zip(both, either, strict=True)):
            self.log(f"overlap of {i}", one / other)
        self.log("zero", torch.max(right.new_zeros(()), right[:, 0]).mul(0).sum())
        for name in "accuracy", "precision", "recall", "f1_score", "specificity":
            figure = getattr(torchmetrics.functional, name)
            binary = {"task": "binary", "validate_args": False}  # that reads numbers
            self.log(f"binary {name}", figure(found.flatten(), expected.flatten(), **binary))
            of_classes = figure(
                right + found, found.argmax(1), task="multiclass", num_classes=CLASSES
            )
            self.log(f"functional {name}", of_classes, on_step=True, on_epoch=True)
        self.log("dice", (2 * both.sum() + 0) / (found.sum() + expected.sum()))

    def on_validation_epoch_end(self) -> None:
        for name, mean in self.averages.items():
            self.log(f"mean {name}", mean.compute())
            mean.reset()


@pytest.mark.parametrize("stages", [1, 2])
def test_means_over_what_is_no_padding(stages: int) -> None:
    expected = told(Padded, 0)
    for found in run_ranks(told, stages, Padded, stages):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_complex_quotients_count_nothing() -> None:
    means = [Mean(torch.ones(()), torch.tensor(1j * i)) for i in (1, 2)]
    with pytest.raises(NoMean):
        mean_of(means, [1, 1])


def test_what_one_micro_batch_has_divided_by_nothing_isn_t_known() -> None:
    def quotient(by: list[float]) -> Any:
        counts = [torch.tensor(count) for count in by]
        return mean_of([Mean(torch.tensor(6.0) / n, n, counts=True) for n in counts], [1, 1])

    assert quotient([2.0, 4.0]) == 2
    with pytest.raises(NoMean):
        quotient([2.0, 0.0])


def test_divisors_are_compared_with_weights_of_another_precision() -> None:
    means = [Mean(torch.ones(()), torch.tensor(n)) for n in (2.0, 4.0)]
    torch.set_default_dtype(torch.float64)  # as Trainer(precision="64-true") does in steps
    try:
        assert mean_of(means, [1.0, 2.0]) == 1
    finally:
        torch.set_default_dtype(torch.float32)


class Extremes(Classifier):
    """Has a metric that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.extremes = MinMaxMetric(MulticlassF1Score(CLASSES))

    def metrics(self, scores: Tensor, targets: Tensor) -> None:
        self.extremes(scores, targets)


def test_extremes_of_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"call its update in the step"):
        told(Extremes, 1)


class Images(Classifier):
    """Has a metric that takes the range of what it compares from each call."""

    def __init__(self) -> None:
        super().__init__()
        self.likeness = torchmetrics.MetricCollection(
            [torchmetrics.image.StructuralSimilarityIndexMeasure()]
        )


def test_a_range_of_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes the range.*data_range=.*step='mini-batch'"):
        told(Images, 1)


class Explains(Classifier):
    """A metric that needs two samples, of mini-batches whose last micro-batch has one."""

    is_called = True

    def __init__(self) -> None:
        super().__init__()
        self.explained = torchmetrics.R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.backbone(batch[0])
        run = self.explained if self.is_called else self.explained.update
        run(scores[:, 0], batch[0][:, 0])
        return functional.mse_loss(scores, batch[0])

    def on_train_epoch_end(self) -> None:
        self.log("explained", self.explained.compute())
        self.explained.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.backbone(batch[0])
        return found

    def train_dataloader(self) -> Any:
        data = super().train_dataloader().dataset
        return DataLoader(data, batch_size=7)


def test_a_metric_of_one_sample_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"two samples.*R2Score was given a micro-batch of one"):
        told(Explains, 1)


class Updates(Explains):
    """Does what the refusal says."""

    is_called = False


def test_what_it_tells_to_do() -> None:
    expected = told(Updates, 0)
    for found in run_ranks(told, 2, Updates, 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class OwnReset(L.LightningModule):
    """Its metric's reset is replaced on the object, as by a mock."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        reset = self.accuracy.reset
        self.accuracy.reset = lambda: reset()  # type: ignore[method-assign]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.backbone(x), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)


def _own_reset(stages: int) -> Any:
    torch.manual_seed(0)
    module, x = OwnReset(), torch.randn(20, 3)
    y = module.backbone(x).argmax(1) * (x.sum(1) > 0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    options = {"strategy": GPipeStrategy(2, step="micro-batch")} if stages else {}
    return trainer(devices=stages or 1, **options).validate(module, loader, verbose=False)


def test_a_metric_whose_reset_is_replaced() -> None:
    plain = _own_reset(0)
    assert plain[0]["accuracy_epoch"] > 0
    assert run_ranks(_own_reset, 2, 2) == [plain] * 2


class InDict(Classifier):
    """Has a metric that is no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = {"kappa": torchmetrics.CohenKappa(task="multiclass", num_classes=CLASSES)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.backbone(batch[0])
        self.apart["kappa"].update(scores, batch[1])
        return functional.cross_entropy(scores, batch[1])


def test_a_metric_in_a_dict_is_refused_with_what_to_do() -> None:
    with pytest.raises(RankError, match="keep the metric as an attribute of the module"):
        run_ranks(told, 2, InDict, 2)


class SaysSize(L.LightningModule):
    """Logs with a batch size that doesn't depend on the batch, or does."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.backbone(batch[0]).square().mean()
        size = len(batch[0]) if self.size is None else self.size
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = len(batch[0]) if self.size is None else self.size
        loss = self.backbone(batch[0]).square().mean()
        self.log_dict({"val": loss, "index": float(batch_idx)}, batch_size=size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("size", [8, 1, 100, None])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_batch_size_that_is_a_constant_counts_alike_in_all_batches(
    size: int | None, chunks: int
) -> None:
    """The last batch is so small that it has fewer micro-batches."""
    found = []
    x = torch.randn(18, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for options in {}, {"strategy": GPipeStrategy(chunks, step="micro-batch")}:
        torch.manual_seed(0)
        run, module = trainer(devices=1, max_epochs=2, **options), SaysSize(size)
        run.fit(module, DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x), 8))
        found.append(dict(run.callback_metrics))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


class Decides(Validates):
    """Decides by values, in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.backbone(batch[0])
        error, size = functional.mse_loss(scores, batch[0]), scores.abs().mean()
        if self.what == "which is larger":
            self.log("value", max(scores[:, 0].mean(), scores[:, 1].mean()))
        elif self.what == "whether there is one":
            self.log("value", error if (batch[0] > 2).any() else size)
        elif self.what == "what all have":
            self.log("value", error if (batch[0] > -9).all() else size)
        elif self.what == "by sample":
            rows = [row.sum() if row[0] > 0 else row.mean() for row in scores]
            self.log("value", torch.stack(rows).mean())
        return scores


@pytest.mark.parametrize(
    ("what", "is_told"),
    [
        *(("which is larger", True), ("whether there is one", True)),
        *(("what all have", False), ("by sample", False)),
    ],
)
def test_decisions_that_differ_are_told_of_once(what: str, is_told: bool, caplog: Any) -> None:
    texts_of(what, kind=Decides)
    said = [r.getMessage() for r in caplog.records if "steps decide by values" in r.getMessage()]
    assert len(said) == is_told
