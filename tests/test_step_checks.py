"""Losses whose functions look at values, with steps of micro-batches: the stage with them looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Geometric, Independent, Normal, kl_divergence
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer

HALF = models.WIDTH // 2


def gaussian(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(mean, y[:, :HALF], spread.exp())


def one_variance(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    losses = functional.gaussian_nll_loss(mean, y[:, :HALF], spread[:, :1].exp(), reduction="none")
    return losses.mean()


def ctc(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    logits = mean.expand(4, *mean.shape).log_softmax(2)
    targets, lengths = torch.ones(len(y), 2, dtype=torch.long), torch.full((len(y),), 4)
    return functional.ctc_loss(logits, targets, lengths, lengths - 2, reduction="none").mean()


def normal(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    # PyTorch's compiler turns checks off for the process in which it has run
    return -Normal(mean, spread.exp(), validate_args=True).log_prob(y[:, :HALF]).mean()


def categorical(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return -Categorical(logits=mean).log_prob(y[:, :HALF].argmax(1)).mean()


def geometric(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return -Geometric(probs=mean.sigmoid()).log_prob(y[:, :HALF].abs().round()).mean()


def divergence(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
    return kl_divergence(Independent(Normal(mean, spread.exp()), 1), prior).mean()


LOSSES = [gaussian, one_variance, ctc, normal, categorical, geometric, divergence]


class Module(models.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.of = loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self(x).chunk(2, 1)
        return self.of(mean, spread, y)


class Attends(models.Module):
    """Attention behind the backbone, of which no weights are wanted: it returns None beside."""

    def build(self) -> None:
        super().build()
        self.attention = nn.MultiheadAttention(models.WIDTH, 2, batch_first=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self(x)[:, None]
        found, nothing = self.attention(hidden, hidden, hidden, need_weights=False)
        assert nothing is None
        return functional.mse_loss(found[:, 0], y)


def fit(stages: int, kind: Callable[..., models.Module], *arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    strategy: Any = GPipeStrategy(chunks=2, step="micro-batch") if stages else "auto"
    return train(kind(*arguments), max_steps=3, devices=max(stages, 1), strategy=strategy)


@pytest.mark.parametrize("made", [(Attends,), *((Module, loss) for loss in LOSSES)])
def test_weights_equal_a_plain_trainers(made: tuple[Any, ...]) -> None:
    found, expected = run_ranks(fit, 2, 2, *made)[0], run_ranks(fit, 1, 0, *made)[0]
    # the gradient of an attention's key bias is 0, but for rounding, which AdamW makes larger
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def negative_variance(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(mean, y[:, :HALF], -spread.exp())


def no_number(mean: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return normal(mean * torch.nan, spread, y)


@pytest.mark.parametrize("loss", [negative_variance, no_number])
def test_values_that_are_not_valid_are_an_error(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(RankError, match=r"ValueError: [^\n]*(negative entry|invalid values)"):
        run_ranks(fit, 2, 2, Module, loss)


class Tells(nn.Module):
    """Gives a number, or a tensor of another size, that depends on the values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        largest = float(x.detach().max()) if x.device.type != "meta" else 0.5
        return (x, largest) if self.what == "number" else (x, x.new_zeros(len(x), int(largest * 9)))


class WithMore(models.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.backbone.append(Tells(what))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self(x)[0], y)


@pytest.mark.parametrize(
    ("what", "problem"),
    [("number", r"output holds [\d.]+, where it held [\d.]+"), ("size", "another shape or type")],
)
def test_an_output_that_other_stages_can_t_know_is_refused(what: str, problem: str) -> None:
    with pytest.raises(RankError, match=problem):
        run_ranks(fit, 2, 2, WithMore, what)


class Flat(models.Module):
    """Targets of all samples one after another, as a CTC loss takes them, too."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x).expand(4, -1, -1).log_softmax(2)
        lengths = torch.full((len(x),), 4)
        return functional.ctc_loss(logits, y, lengths, lengths - 2)


def fit_flat() -> None:
    inputs, targets = torch.randn(4, models.WIDTH), torch.ones(8, dtype=torch.long)
    strategy = GPipeStrategy(chunks=2, step="micro-batch")
    run = trainer(max_steps=1, devices=2, strategy=strategy)
    run.fit(Flat(), DataLoader([(inputs, targets)], batch_size=None))


def test_an_error_tells_of_what_is_not_split() -> None:
    with pytest.raises(RankError, match=r"came whole, with the shape \(8,\).* pad them to"):
        run_ranks(fit_flat, 2)
