"""Language models whose embedding, head and loss stand outside the backbone."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from lightning_gpipe import Blocks

VOCABULARY, WIDTH, LENGTH, SAMPLES = 13, 8, 6, 48


class Layer(nn.Module):
    """What an ordinary layer does: some of what it is given goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Language(L.LightningModule):
    """Tokens in, the next tokens out."""

    batch_size = 12

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.build()
        self.double()

    def build(self) -> None:
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.backbone = nn.Sequential(*(Layer() for _ in range(8)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens) + self.positions(places)
        logits: Tensor = self.head(self.norm(self.backbone(hidden)))
        return logits

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss if isinstance(loss, Tensor) else loss["loss"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss if isinstance(loss, Tensor) else loss["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        return TensorDataset(tokens, (tokens * 3 + 1) % VOCABULARY)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data(), batch_size=self.batch_size)

    val_dataloader = train_dataloader


class Tied(Language):
    """The head's weight is the embedding's."""

    def build(self) -> None:
        super().build()
        self.head.weight = self.embed.weight


class Measured(Language):
    """Has metrics in the step."""

    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(VOCABULARY, average="micro")

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        self.accuracy(logits.flatten(0, 1), targets.flatten())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Weighted(Language):
    """Counts tokens that are no padding, of which each sample has another number."""

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        lengths = tokens[:, :1] % LENGTH
        targets = targets.masked_fill(torch.arange(LENGTH, device=lengths.device) > lengths, -100)
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        return {"loss": loss, "weight": (targets != -100).sum()}


class WeightedTied(Weighted, Tied):
    """Both."""


class Half(Tied):
    """In single precision, for autocast and a loss scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Frozen(Language):
    """Trains neither its head nor its embedding."""

    def build(self) -> None:
        super().build()
        self.head.requires_grad_(False)
        self.embed.requires_grad_(False)


class Around(Language):
    """Uses a value from before the backbone behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        logits: Tensor = self.head(self.norm(self.backbone(hidden) + hidden))
        return logits


class Looped(Tied):
    """Calls its layers one by one."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.backbone:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Normed(Language):
    """Has batch norm on both sides of the backbone."""

    def build(self) -> None:
        super().build()
        self.before, self.behind = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.before(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        hidden = self.behind(self.backbone(hidden).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


class Masked(Language):
    """Gives its layers a mask per sample, and its batch as a dict."""

    def build(self) -> None:
        super().build()
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(8))
        self.backbone = Blocks(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, mask = self.embed(tokens), tokens == 0
        for layer in self.backbone:
            hidden = layer(hidden, src_key_padding_mask=mask)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, batch: Any) -> Any:
        return super().loss((batch["tokens"], batch["targets"]))

    def train_dataloader(self) -> Any:
        tokens, targets = self.data().tensors
        rows = [
            {"tokens": t, "targets": y, "name": str(i)}
            for i, (t, y) in enumerate(zip(tokens, targets, strict=True))
        ]
        return DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


class GPT2(Language):
    """GPT-2 as Hugging Face wrote it; its head is its embedding."""

    def build(self) -> None:
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=8,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    def loss(self, batch: Any) -> Any:
        tokens, _ = batch
        return self.model(input_ids=tokens, labels=tokens).loss


class Bert(Language):
    """BERT as Hugging Face wrote it, with attention masks."""

    def build(self) -> None:
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=8,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
        self.model = BertForSequenceClassification(config)

    def loss(self, batch: Any) -> Any:
        tokens, targets = batch
        places = torch.arange(LENGTH, device=tokens.device)
        mask = (places <= tokens[:, :1] % LENGTH).long()
        output = self.model(input_ids=tokens, attention_mask=mask, labels=targets[:, 0] % 3)
        return output.loss


def parts_of(batch: Any, chunks: int) -> list[Any]:
    """The micro-batches of a batch, written down once more."""
    if isinstance(batch, dict):
        columns = [parts_of(column, chunks) for column in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(batch, list) and isinstance(batch[0], Tensor):
        columns = [parts_of(column, chunks) for column in batch]
        return [list(row) for row in zip(*columns, strict=True)]
    count = min(chunks, len(batch))
    bounds = torch.arange(len(batch)).tensor_split(count)
    return [batch[int(rows[0]) : int(rows[-1]) + 1] for rows in bounds]


def with_weighted_losses(kind: type[Language], chunks: int) -> type[Language]:
    """The same module, whose step takes the mean of the micro-batches' losses by itself."""

    class Plain(kind):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses, weights = [], []
            for part in parts_of(batch, chunks):
                found = self.loss(part)
                first = next(iter(part.values())) if isinstance(part, dict) else part[0]
                is_weighted = isinstance(found, dict)
                losses.append(found["loss"] if is_weighted else found)
                weights.append(float(found["weight"]) if is_weighted else len(first))
            total = sum(weights)
            return sum(loss * (w / total) for loss, w in zip(losses, weights, strict=True))

    return Plain
