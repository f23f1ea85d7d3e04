"""PyTorch's Transformer encoder with a padding mask, of which it makes nested tensors."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import trainer

WIDTH, WORDS, PADDING = 8, 20, 0


class Classifier(L.LightningModule):
    """Sees what the encoder gives where the mask pads, too; subclasses vary it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = self.build(layer)
        self.head = nn.Linear(WIDTH, 4)
        self.double()

    def build(self, layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
        return nn.TransformerEncoder(layer, 4)

    def mask(self, tokens: Tensor) -> Tensor:
        return tokens == PADDING

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=self.mask(tokens))
        scores: Tensor = self.head(hidden).sigmoid().mean(1)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def data(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, WORDS, (24, 10), generator=generator)
        tokens[:, 7:] = PADDING
        tokens[::3, 5:] = PADDING
        targets = torch.randint(0, 4, (24,), generator=generator)
        return DataLoader(TensorDataset(self.padded(tokens), targets), 12)

    def padded(self, tokens: Tensor) -> Tensor:
        return tokens


class Normed(Classifier):
    """Has a norm behind the layers, which gives its bias where the mask pads."""

    def build(self, layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
        norm = nn.LayerNorm(WIDTH)
        nn.init.ones_(norm.bias)
        return nn.TransformerEncoder(layer, 4, norm)


class Before(Classifier):
    """Is padded before the tokens: that becomes no nested tensor."""

    def padded(self, tokens: Tensor) -> Tensor:
        return tokens.flip(1)


class Added(Classifier):
    """Gives what is added to the scores."""

    def mask(self, tokens: Tensor) -> Tensor:
        return torch.zeros(tokens.shape).masked_fill(tokens == PADDING, -torch.inf).double()


class Dense(Classifier):
    """Wants no nested tensors."""

    def build(self, layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


class Features(Normed):
    """Trains a head on what a frozen encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        self.embed.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.eval()


class FeaturesOfTrained(Features):
    """The same of an embedding that trains: PyTorch makes no nested tensors then, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(True)


class Causal(Classifier):
    """Has a mask of times, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.double)
        pads = torch.zeros(tokens.shape).masked_fill(tokens == PADDING, -1e9).double()
        hidden = self.encoder(self.embed(tokens), mask=later, src_key_padding_mask=pads)
        scores: Tensor = self.head(hidden).sigmoid().mean(1)
        return scores


class Outside(Classifier):
    """Has a teacher, and an encoder behind the backbone."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.teacher = nn.TransformerEncoder(layer, 1).requires_grad_(False)
        self.double()

    def build(self, layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
        return nn.TransformerEncoder(layer, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        pads, embedded = self.mask(tokens), self.embed(tokens)
        with torch.no_grad():
            taught = self.teacher(embedded.detach(), src_key_padding_mask=pads)
        hidden = self.encoder(self.backbone(embedded), src_key_padding_mask=pads)
        scores: Tensor = self.head(hidden + taught).sigmoid().mean(1)
        return scores

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.teacher.eval()


KINDS = Classifier, Normed, Before, Added, Dense, Features, FeaturesOfTrained, Causal, Outside


def trained(kind: type[Classifier], stages: int, step: Any = "mini-batch") -> Any:
    options: dict[str, Any] = {}
    if stages:
        backbone = "backbone" if kind is Outside else "encoder.layers"
        strategy = GPipeStrategy(4, step=step, backbone=backbone)
        options = {"devices": stages, "strategy": strategy}
    module = kind()
    run = trainer(max_epochs=2, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors.*")
        run.fit(module, module.data(), module.data())
        validated = run.callback_metrics["val"]
        predicted = run.predict(module, module.data())
    assert module.encoder.norm is None or isinstance(module.encoder.norm, nn.LayerNorm)
    return module.state_dict(), validated, predicted


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_gives_what_it_gives_alone(kind: type[Classifier], step: str) -> None:
    nest = "_nested_tensor_from_mask"
    with patch.object(torch, nest, wraps=getattr(torch, nest)) as made:
        expected = trained(kind, 0)
    assert made.called == (kind not in (Before, Dense, Causal))
    for stages in (1, 2) if kind in (Classifier, Outside) else (2,):
        for found in run_ranks(trained, stages, kind, stages, step):
            torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-10)
            torch.testing.assert_close(torch.cat(found[2]), torch.cat(expected[2]))
