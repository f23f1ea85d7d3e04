"""Of what the step computes of the data before the backbone, or beside it, is told, too."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import train

F = nn.functional
SAMPLES, LENGTH, WIDTH = 16, 8, 6


class Outside(L.LightningModule):
    """Embeds tokens, ``[samples, length]``, before the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(20, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.Linear(LENGTH, 2 * WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, WIDTH)
        )
        self.prior = nn.Parameter(torch.zeros(SAMPLES // 4, WIDTH))
        self.register_buffer("importance", torch.rand(SAMPLES // 4, WIDTH))

    def before(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(x) + self.places(torch.arange(LENGTH))
        return hidden.mean(1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.body(self.before(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Attending(Outside):
    """Looks at the tokens by attention."""

    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, batch_first=self.batch_first
        )

    def before(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.places(torch.arange(LENGTH))
        return self.layer(hidden).mean(1)


class AttendingSamples(Attending):
    """Takes samples for time."""

    batch_first = False


class TimeFirst(Attending):
    """As long as two micro-batches, and right: the layer gets time first."""

    batch_first = False

    def before(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x.T) + self.places(torch.arange(LENGTH))[:, None]
        return self.layer(hidden).mean(0)


class Centred(Outside):
    """Takes the samples' mean away."""

    def before(self, x: Tensor) -> Tensor:
        hidden = super().before(x)
        return hidden - hidden.mean(0)


class CentredAgain(Centred):
    """The same, computed again in the backward."""

    def before(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x).mean(1)
        return checkpoint(lambda h: h - h.mean(0), hidden, use_reentrant=False)


class Encoded(Outside):
    """An autoencoder whose decoder is the backbone."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0][:, :WIDTH].float()
        mean, log_variance = F.linear(batch[2], self.encoder.weight).chunk(2, 1)
        return F.mse_loss(self.body(mean), x) + self.beside(mean, log_variance)

    def beside(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return self.divergence(mean, log_variance).sum(1).mean()

    def divergence(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)


class Summed(Encoded):
    def beside(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return 1e-3 * self.divergence(mean, log_variance).sum()


class Paired(Encoded):
    def beside(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return (mean[:, None] - mean[None]).square().mean()


class Ordered(Encoded):
    def beside(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return (mean - mean[torch.randperm(len(mean))]).square().mean()


class Elastic(Encoded):
    """A sum over weights, of as many as there are samples."""

    def beside(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        assert isinstance(self.importance, Tensor)
        return (self.importance * (self.prior - 1).square()).sum()


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 20, (SAMPLES, LENGTH), generator=generator)
    y = torch.randint(0, WIDTH, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(x, y, torch.randn(SAMPLES, LENGTH)), SAMPLES)


def told(kind: type[Outside], step: Any = "micro-batch", chunks: int = 4, devices: int = 1) -> str:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(chunks, step=step, backbone="body")
        train(kind(), data(), strategy=strategy, devices=devices, max_epochs=3)
    texts = [str(each.message) for each in found if "micro-batch" in str(each.message)]
    return "".join(texts)


@pytest.mark.parametrize("kind", [AttendingSamples, Centred, CentredAgain])
def test_an_input_that_mixes_samples_is_told_of(kind: type[Outside]) -> None:
    text = told(kind)
    assert "What stands before the backbone computes samples together" in text
    assert text.count("before the backbone") == 1
    assert told(kind, chunks=1) == told(kind, "mini-batch") == ""


@pytest.mark.parametrize("kind", [Outside, Attending, TimeFirst, Encoded, Elastic])
def test_nothing_is_told_where_samples_are_alone(kind: type[Outside]) -> None:
    assert told(kind) == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Summed, "The loss seems to be a sum over samples"),
        (Paired, "'sub' computes it of several samples together"),
        (Ordered, "'sub' computes it of several samples together"),
    ],
)
def test_terms_that_are_not_of_the_output_are_told_of(kind: type[Outside], text: str) -> None:
    assert text in told(kind)


@pytest.mark.parametrize("kind", [AttendingSamples, Paired])
def test_the_stage_that_computes_it_tells(kind: type[Outside]) -> None:
    first, last = run_ranks(told, 2, kind, "micro-batch", 4, 2)
    assert bool(first) == (kind is AttendingSamples)
    assert bool(last) == (kind is Paired)
