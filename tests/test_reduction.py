"""Losses that micro-batches reduce otherwise than the mini-batch are told of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import train

F = nn.functional
SAMPLES, CLASSES, PADDING = 16, 8, -100


class Losses(L.LightningModule):
    """A small model with any loss.

    Args:
        reduce: Makes a loss, or what a step returns, of scores and classes, some of them padding.
    """

    def __init__(self, reduce: Callable[[L.LightningModule, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.reduce = reduce
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.norm = nn.BatchNorm1d(CLASSES) if reduce is normed else nn.Identity()
        self.square = nn.Parameter(torch.ones(CLASSES, SAMPLES // 4))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        return self.reduce(self, self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def data(is_padded: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    if is_padded:
        y[:6] = PADDING
    return DataLoader(TensorDataset(x, y), SAMPLES)


def told(
    reduce: Any,
    is_padded: bool = False,
    step: Any = "micro-batch",
    chunks: int = 4,
    **options: Any,
) -> str:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"devices": 1, "max_epochs": 3, **options}
        torch.manual_seed(0)
        strategy = GPipeStrategy(chunks, step=step)
        train(Losses(reduce), data(is_padded), strategy=strategy, **options)
    texts = [text for each in found if "The loss" in (text := str(each.message))]
    texts = [text for text in texts if "is NaN or infinite" not in text]  # of nothing but padding
    assert len(texts) <= 1
    return "".join(texts)


def later(change: Any) -> Callable[[L.LightningModule, Tensor, Tensor], Any]:
    """A mean over samples, which something changes from the third mini-batch on."""

    def reduce(module: L.LightningModule, x: Tensor, y: Tensor) -> Any:
        return change(x, y) if module.trainer.global_step >= 2 else F.cross_entropy(x, y)

    return reduce


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), "a sum over samples"),
        (lambda x, y: F.cross_entropy(x, y) + (x @ x.T).exp().mean(), "isn't a mean over samples"),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=int(y[0])), "different numbers"),
    ],
)
def test_losses_that_change_later_are_told_of(change: Any, text: str) -> None:
    assert text in told(later(change), max_epochs=5)
    assert told(later(F.cross_entropy), max_epochs=5) == ""


def normed(module: L.LightningModule, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.norm(x), y)


def each(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, reduction="none")


def three(x: Tensor, y: Tensor) -> Tensor:
    """Losses of three tasks."""
    return torch.stack([F.cross_entropy((i + 1) * x, y) for i in range(3)])


def regularization(module: L.LightningModule) -> Tensor:
    return torch.stack([p.square().sum() for p in module.net[2].parameters()]).sum()


class SumOwn(torch.autograd.Function):
    """Of which nothing can be told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.shape)


SUMS: dict[str, Any] = {
    "by an argument": lambda _, x, y: F.cross_entropy(x, y, reduction="sum"),
    "written out": lambda _, x, y: -x.log_softmax(1).gather(1, y[:, None]).sum(),
    "of two terms": lambda _, x, y: F.cross_entropy(x, y) - 0.5 * torch.sum(1 - x.square()),
    "of samples first": lambda _, x, y: each(x, y).sum(),
    "of squares": lambda _, x, y: F.mse_loss(x, F.one_hot(y, CLASSES).float(), reduction="sum"),
    "by a small factor": lambda _, x, y: F.cross_entropy(x, y) + 1e-3 * x.square().sum(),
    "by a product": lambda _, x, y: each(x, y) @ x.detach()[:, 0].softmax(0),
    "by the mini-batch": lambda _, x, y: F.cross_entropy(x, y, reduction="sum") / SAMPLES,
    "by the mini-batch, of as many classes as micro-batches": lambda _, x, y: (
        F.cross_entropy(x[:, :4], y % 4, reduction="sum") / SAMPLES
    ),
    "by the mini-batch's elements": lambda _, x, y: x.square().sum() / (SAMPLES * CLASSES),
    "in a dict": lambda _, x, y: {"loss": x.square().sum((0, 1))},
    "in a loop": lambda _, x, y: sum(F.cross_entropy(x[i], y[i]) for i in range(len(x))),
    "with a factor": lambda _, x, y: sum(2 * F.cross_entropy(x[i], y[i]) for i in range(len(x))),
    "of a stack": lambda _, x, y: torch.stack([*map(F.cross_entropy, x, y)]).sum(),
    "of rows": lambda _, x, y: torch.stack([row.square().mean() for row in x.unbind()]).sum(),
}
MEANS: dict[str, Any] = {
    "in a loop": lambda _, x, y: sum(map(F.cross_entropy, x, y)) / len(x),
    "of shares in a loop": lambda _, x, y: sum(c / len(x) for c in map(F.cross_entropy, x, y)),
    "in a loop, by a factor": lambda _, x, y: sum(map(F.cross_entropy, x, y)) * (1 / len(x)),
    "of rows": lambda _, x, y: torch.stack([row.square().mean() for row in x.unbind()]).mean(),
    "of a feature each": lambda _, x, y: sum(x[:, i].mean() for i in range(SAMPLES // 4)),
    "by default": lambda _, x, y: F.cross_entropy(x, y),
    "behind a batch norm": normed,
    "of sums": lambda _, x, y: x.square().sum(1).mean(),
    "by the number": lambda _, x, y: each(x, y).sum() / len(x),
    "by a factor": lambda _, x, y: x.square().sum() * (1 / x.numel()),
    "of features": lambda m, x, y: (x.square().mean(0) * m.net[2].bias.exp()).sum(),
    "of each sample's softmax": lambda _, x, y: (
        sum((x[i].softmax(0) * x[i].sort(0)[0])[:4].std(0) for i in range(len(x))) / len(x)
    ),
    "of each sample's largest": lambda _, x, y: (
        sum(x[i : i + 1].flatten().topk(2)[0].sum() for i in range(len(x))) / len(x)
        + sum(row.flatten().sort()[0][:4].sum() for row in x.split(1)) / len(x)
    ),
    "of two views again": lambda _, x, y: (
        F.mse_loss(*torch.cat([x, 2 * x]).chunk(2)) + torch.cat([x, x])[: len(x)].mean()
    ),
    "of products": lambda _, x, y: each(x, y) @ x[:, 0].sigmoid() / len(x),
    "of several tasks": lambda m, x, y: (
        torch.stack([F.cross_entropy((i + 1) * x, y) for i in range(4)])  # as many as samples
        * torch.exp(-m.net[2].bias[:4])
    ).sum(),
    "over time first": lambda _, x, y: (
        x.view(-1, 4, 2).transpose(0, 1).softmax(0) * x.view(-1, 4, 2).transpose(0, 1)
    ).mean(),
    "of a matrix of weights": lambda m, x, y: (
        torch.einsum("nd,dk->nk", x, m.square).square().mean()
        + (x[:, None] * m.square.T[None]).square().mean()
    ),
    "of normalised weights": lambda m, x, y: F.cross_entropy(
        8 * F.linear(F.normalize(x), F.normalize(m.square.T)), y % (SAMPLES // 4)
    ),
    "of classes of a head": lambda m, x, y: F.cross_entropy(x @ m.net[2].weight[:, :8].T, y),
    "by as many elements as samples": lambda _, x, y: x[:, :4].square().sum() / (4 * len(x)),
    "by tokens": lambda _, x, y: x.square().sum() / x.numel(),
    "of differences to features": lambda _, x, y: (x[:, :, None] - x[:, None]).square().mean(),
    "of terms": lambda _, x, y: torch.stack([each(x, y).mean(), x.square().mean()]).sum(),
    "by a temperature": lambda _, x, y: x.square().mean() / 0.7,
    "by a random factor": lambda _, x, y: each(x, y).mean() * torch.rand(()),
    "of signs": lambda _, x, y: (x[:, 0] * torch.tensor([1.0, -1.0] * 2)).relu().mean(),
    "of one weight": lambda _, x, y: (each(x, y) * torch.ones(len(x))).mean(),
    "of weights": lambda _, x, y: (each(x, y) * torch.rand(len(x))).mean(),
    "of no nan": lambda _, x, y: torch.nansum(each(x, y)),  # nothing can be told
    "of one's own": lambda _, x, y: SumOwn.apply(x) / x.numel(),
    "of one's own sum": lambda _, x, y: SumOwn.apply(x),
    "with a regularization": lambda m, x, y: F.cross_entropy(x, y) + 1e-3 * regularization(m),
    "with a weight": lambda m, x, y: F.cross_entropy(x, y) * m.net[2].bias.exp().mean() / 2,
    "with the norm of weights": lambda m, x, y: F.cross_entropy(x, y) + m.net[2].weight.norm(),
    "expanded": lambda _, x, y: F.cross_entropy(x, y).expand(1).sum(),
    "of samples' roots": lambda _, x, y: sum(row.square().mean().sqrt() for row in x) / len(x),
    "of matrices": lambda _, x, y: (x.view(-1, 4, 2) @ x.view(-1, 2, 4)).square().mean(),
    "of each one's matrix": lambda _, x, y: (
        sum((row.view(4, 2) @ row.view(2, 4)).square().mean() for row in x) / len(x)
    ),
    "of samples' matrices": lambda _, x, y: sum(row.view(4, 2).norm() for row in x) / len(x),
    "of one sample after another": lambda _, x, y: (
        sum(F.mse_loss(x[i].view(4, 2), torch.ones(4, 2)).sqrt() for i in range(len(x))) / len(x)
    ),
    "of rolled features": lambda _, x, y: (x.roll(1, 1) - x.flip(-1)).square().mean(),
    "of distances to others": lambda _, x, y: torch.cdist(x, torch.ones(3, x.shape[1])).mean(),
    "of roots": lambda _, x, y: (x.square() + 1).sqrt().mean(),
    "with weights": lambda _, x, y: {"loss": each(x, y).sum(), "weight": len(x)},
}
COUNTED: dict[str, Any] = {
    "by an argument": lambda _, x, y: F.cross_entropy(x, y, ignore_index=PADDING),
    "written out": lambda _, x, y: (
        (each(x, y.clamp(min=0)) * (y != PADDING)).sum() / (y != PADDING).sum().clamp(min=1)
    ),
}
CURVED: dict[str, tuple[str, Any]] = {
    "a root": ("sqrt", lambda _, x, y: F.mse_loss(x, F.one_hot(y, CLASSES).float()).sqrt()),
    "a logarithm of a mean": ("log", lambda _, x, y: 2 * each(x, y).mean().log() + 1),
    "a norm": ("linalgvectornorm", lambda _, x, y: torch.linalg.vector_norm(x)),
    "overlaps": (
        "div",
        lambda _, x, y: 1 - (x.sigmoid() * F.one_hot(y, CLASSES)).sum() / x.sigmoid().sum(),
    ),
    "a largest one": ("max", lambda _, x, y: each(x, y).max()),
    "the largest of some": ("max", lambda _, x, y: three(x, y).max()),
    "the two largest of some": ("topk", lambda _, x, y: three(x, y).topk(2)[0].mean()),
    "a flooded mean of some": ("abs", lambda _, x, y: (three(x, y).mean() - 1).abs() + 1),
    "a product": ("mul", lambda _, x, y: F.cross_entropy(x, y) * x.square().mean()),
    "a focal loss of a mean": (
        "mul",
        lambda _, x, y: (1 - torch.exp(-F.cross_entropy(x, y))) * F.cross_entropy(x, y),
    ),
    "pairs": ("matmul", lambda _, x, y: F.cross_entropy(x @ x.T, torch.arange(len(x)))),
    "pairs of two views": (
        "einsum",
        lambda _, x, y: torch.einsum("nd,md->nm", *[torch.cat([x, 2 * x])] * 2).exp().mean(),
    ),
    "products": ("square", lambda _, x, y: (x[:, :3].T @ x / len(x)).square().sum()),
    "rolled ones": (
        "triplet_margin_loss",
        lambda _, x, y: F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0)),
    ),
    "flipped ones": ("sub", lambda _, x, y: (x - x.flip(0)).square().mean()),
    "distances": ("cdist", lambda _, x, y: torch.cdist(x, x, p=1.0).mean()),
    "Euclidean distances": (
        "cdist",
        lambda _, x, y: torch.cdist(x, 2 * x, 2.0, "use_mm_for_euclid_dist").mean(),
    ),
    "distances of all": ("pdist", lambda _, x, y: F.pdist(x).mean()),
    "means of features": ("square", lambda _, x, y: x.mean(0).square().sum()),
    "an entropy": ("log", lambda _, x, y: (x.softmax(1).mean(0).log() / 3).sum()),
    "centred ones": ("sub", lambda _, x, y: (x - x.mean(0)).square().mean()),
    "standard deviations": ("std", lambda _, x, y: (1 - x.std(0)).relu().mean()),
    "variances": ("var", lambda _, x, y: x.var(0).mean()),
    "the hardest": ("topk", lambda _, x, y: each(x, y).topk(2)[0].mean()),
    "the hardest elements": ("topk", lambda _, x, y: x.square().flatten().topk(8)[0].mean()),
    "elements in order": (
        "sort",
        lambda _, x, y: x.flatten().sort(descending=True)[0] @ torch.linspace(1, 0, x.numel()),
    ),
    "a median": ("median", lambda _, x, y: each(x, y).median()),
    "sums so far": ("cumsum", lambda _, x, y: each(x, y).cumsum(0).log().mean()),
    "risks": ("logcumsumexp", lambda _, x, y: (x[:, 0].logcumsumexp(0) - x[:, 0]).mean()),
    "a softmax of samples": ("log_softmax", lambda _, x, y: x.log_softmax(0).mean()),
    "keys without a gradient": ("matmul", lambda _, x, y: (x @ x.detach().T).logsumexp(1).mean()),
    "another tower": (
        "matmul",
        lambda m, x, y: F.cross_entropy(m.net[2].weight.T[: len(x)] * 2 @ x.T, y % 4),
    ),
    "differences of all": ("sub", lambda _, x, y: (x[:, None] - x[None]).square().mean()),
    "halves": ("mse_loss", lambda _, x, y: F.mse_loss(x[: len(x) // 2], x[len(x) // 2 :])),
    "chunks": ("mse_loss", lambda _, x, y: F.mse_loss(*x.chunk(2))),
    "a bound": ("clamp", lambda _, x, y: F.cross_entropy(x, y).clamp(min=0.5)),
}

#: Losses that couple samples by what nobody would look for by name.
COUPLED: dict[str, Any] = {
    "others in random order": lambda _, x, y: (x - x[torch.randperm(len(x))]).square().mean(),
    "normalised ones": lambda _, x, y: F.cross_entropy(
        F.batch_norm(x, None, None, training=True), y
    ),
    "variances of as many features": lambda _, x, y: x[:, :4].var(0).mean(),
    "centred ones of as many features": lambda _, x, y: (x[:, :4] - x[:, :4].mean(0)).exp().mean(),
    "neighbours of as many features": lambda _, x, y: (x[1:, :4] - x[:-1, :4]).square().mean(),
    "singular values": lambda _, x, y: torch.linalg.svdvals(x).mean(),
    "means of classes": lambda _, x, y: (
        torch.zeros(CLASSES, CLASSES).index_add(0, y % 2, x).square().mean()
    ),
    "a hinge": lambda _, x, y: (
        ((x - x[0]).square().sum(1)[1:] - (x - x[1]).square().sum(1)[1:] + 1).relu().mean()
    ),
    "of samples by tokens": lambda _, x, y: (
        lambda tokens: (tokens - tokens[torch.randperm(len(tokens))]).square().mean()
    )(x.reshape(-1, 2)),
    "the hardest, by a threshold": lambda _, x, y: (
        lambda losses: (losses * (losses > losses.detach().quantile(0.5))).mean()
    )(each(x, y)),
    "those above the mean": lambda _, x, y: (
        lambda losses: losses[losses > losses.detach().mean()].sum() / len(x)
    )(each(x, y)),
    "a baseline of rewards": lambda _, x, y: (
        -(((y > 3).float() - (y > 3).float().mean()) * x.log_softmax(1)[:, 0]).mean()
    ),
    "half of them": lambda _, x, y: F.cross_entropy(x[: len(x) // 2], y[: len(x) // 2]),
    "the last one": lambda _, x, y: F.cross_entropy(x, y) + x[-1].square().mean(),
    "with weights": lambda _, x, y: {
        "loss": (x - x[torch.randperm(len(x))]).square().mean(),
        "weight": len(x),
    },
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("dtype", [None, "64-true"])
def test_what_couples_samples_is_told(name: str, dtype: Any) -> None:
    options = {} if dtype is None else {"precision": dtype}
    assert "isn't a mean over samples: " in told(COUPLED[name], **options)


def test_weights_of_the_batch_s_classes_are_told() -> None:
    def by_count(_: Any, x: Tensor, y: Tensor) -> Any:
        weights = 1 / torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return {"loss": F.cross_entropy(x, y, weights), "weight": weights[y].sum()}

    def by_positives(_: Any, x: Tensor, y: Tensor) -> Tensor:
        positive = y > 3
        weight = (~positive).sum() / positive.sum()
        return F.binary_cross_entropy_with_logits(x[:, 0], positive.float(), pos_weight=weight)

    def given(_: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1, CLASSES)
        loss = F.binary_cross_entropy_with_logits(
            x, F.one_hot(y, CLASSES).float(), pos_weight=weights
        )
        return loss + F.cross_entropy(x, y, weights, reduction="none").mean()

    for reduce in by_count, by_positives:
        assert "such as weights of classes" in told(reduce)
    assert told(given) == ""


class Kept(L.LightningModule):
    """Keeps the gradient of a tensor of its step, or counts how often a hook sees it."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.keeps = keeps
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.calls = 0

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        scores = self.net(batch[0]) * 2
        if self.keeps:
            scores.retain_grad()
        else:
            scores.register_hook(self.count)
        self.kept.append((scores, batch[1]))
        return F.cross_entropy(scores, batch[1])

    def count(self, _: Tensor) -> None:
        self.calls += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_hangs_on_tensors_is_seen_once(keeps: bool) -> None:
    module = Kept(keeps)
    train(module, data(), strategy=GPipeStrategy(4, step="micro-batch"), devices=1, max_epochs=1)
    assert module.calls == (0 if keeps else 4)
    for scores, y in module.kept if keeps else ():
        expected = (scores.detach().softmax(1) - F.one_hot(y, CLASSES)) / SAMPLES
        torch.testing.assert_close(scores.grad, expected)


@pytest.mark.parametrize("name", CURVED)
def test_what_is_no_mean_is_told(name: str) -> None:
    operation, reduce = CURVED[name]
    assert f"isn't a mean over samples: '{operation}' computes it" in told(reduce)
    assert told(reduce, step="mini-batch") == ""


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_told(name: str) -> None:
    text = told(SUMS[name])
    assert "seems to be a sum over samples" in text
    assert "1/4 of the mini-batch's sum" in text


@pytest.mark.parametrize("name", MEANS)
def test_nothing_is_told_of_a_mean(name: str) -> None:
    assert told(MEANS[name]) == ""
    chunks = 4 if name == "of signs" else 8  # it is made for micro-batches of four
    assert told(MEANS[name], chunks=chunks, accumulate_grad_batches=2) == ""


@pytest.mark.parametrize("name", COUNTED)
def test_a_mean_over_different_numbers_is_told(name: str) -> None:
    assert "mean over different numbers of elements" in told(COUNTED[name], is_padded=True)
    assert told(COUNTED[name]) == ""


BY_WEIGHTS: dict[str, Any] = {
    "sums": lambda x, y, w: (each(x, y) * w).sum() / w.sum(),
    "a selection": lambda x, y, _: each(x, y)[y > 2].mean(),
}
DIVIDED: dict[str, Any] = {
    "means": lambda x, y, w: (each(x, y) * w).mean() / w.mean(),
    "a variance": lambda x, y, _: x.square().mean() / x.detach().var(),
    "a deviation": lambda x, y, _: (each(x, y) / x.detach().std()).mean(),
    "the largest": lambda x, y, _: (each(x, y) / each(x, y).detach().max()).mean(),
    "itself": lambda x, y, _: (loss := each(x, y).mean()) / loss.detach(),
}
NORMALISED: dict[str, Any] = {
    "by the sum": lambda x, y, w: (each(x, y) * (w / w.sum() * len(w))).mean(),
    "by the mean": lambda x, y, w: (each(x, y) * (w / w.mean())).mean(),
    "to one": lambda x, y, w: (each(x, y) * w.softmax(0)).sum(),
    "advantages": lambda x, y, w: (-x.exp()[:, 0] * ((w - w.mean()) / w.std())).mean(),
    "a baseline": lambda x, y, w: -((w - w.mean()) * x.log_softmax(1)[:, 0]).mean(),
    "targets": lambda x, y, w: F.mse_loss(x[:, 0], (w - w.mean()) / w.std()),
}


def weights_of(x: Tensor) -> Tensor:
    return x.detach()[:, 0].abs() + 0.1


@pytest.mark.parametrize("name", BY_WEIGHTS)
def test_a_mean_by_weights_is_told(name: str) -> None:
    text = told(lambda _, x, y: BY_WEIGHTS[name](x, y, weights_of(x)))
    assert "or over different weights" in text


@pytest.mark.parametrize("name", DIVIDED)
def test_a_quotient_of_micro_batches_is_told(name: str) -> None:
    text = told(lambda _, x, y: DIVIDED[name](x, y, weights_of(x)))
    assert "isn't a mean over samples" in text


@pytest.mark.parametrize("name", NORMALISED)
def test_what_is_normalised_by_micro_batches_is_told(name: str) -> None:
    text = told(lambda _, x, y: NORMALISED[name](x, y, weights_of(x)))
    assert "isn't a mean over samples" in text or (name == "to one" and "a sum" in text)


@pytest.mark.parametrize("name", ["by the mean", "advantages", "a baseline", "targets"])
@pytest.mark.parametrize("chunks", [5, 6, 8])
def test_it_is_told_of_few_samples(name: str, chunks: int) -> None:
    text = told(lambda _, x, y: NORMALISED[name](x, y, weights_of(x)), chunks=chunks)
    assert "isn't a mean over samples" in text


def test_one_sample_tells_nothing_of_it() -> None:
    def reduce(_: Any, x: Tensor, y: Tensor) -> Tensor:
        w = weights_of(x)
        return -((w - w.mean()) * x.log_softmax(1)[:, 0]).mean()

    assert "isn't a mean over samples" in told(reduce, chunks=10)  # 2 of them, or 1


@pytest.mark.parametrize("labels", [(0.0, 1.0), (-1.0, 1.0), (0.1, 0.9)])
def test_labels_of_two_samples_are_no_normalised_numbers(labels: tuple[float, float]) -> None:
    def reduce(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x[:, 0], torch.tensor(labels))

    assert told(reduce, chunks=8) == ""


def test_weights_mend_it() -> None:
    def weighted(module: L.LightningModule, x: Tensor, y: Tensor) -> Any:
        loss = COUNTED["written out"](module, x, y)
        return {"loss": loss, "weight": (y != PADDING).sum()}

    assert told(weighted, is_padded=True) == ""


def test_a_small_number_behind_a_count_couples_nothing() -> None:
    def weighted(module: L.LightningModule, x: Tensor, y: Tensor) -> Any:
        counted = (y % 3 > 0).to(x.dtype)
        return {
            "loss": (each(x, y) * counted).sum() / (counted.sum() + 1e-8),
            "weight": counted.sum(),
        }

    assert told(weighted, precision="64-true") == ""


def test_a_weight_of_which_nothing_is_known_is_no_reason_to_tell() -> None:
    def weighted(module: L.LightningModule, x: Tensor, y: Tensor) -> Any:
        counted = y % 3 > 0
        loss = (each(x, y) * counted).sum() / counted.sum()
        module.log("count", int(counted.sum()), reduce_fx="sum")  # what follows can't run again
        return {"loss": loss, "weight": counted.sum()}

    assert told(weighted) == ""


def test_a_step_of_the_whole_mini_batch_may_sum() -> None:
    assert told(SUMS["by an argument"], step="mini-batch") == ""


def told_on_ranks() -> str:
    return told(SUMS["by an argument"], devices=2)


def test_the_last_stage_tells() -> None:
    first, last = run_ranks(told_on_ranks, 2)
    assert first == ""
    assert "seems to be a sum over samples" in last
