"""Train a small GPT on English text, character by character, cut into a pipeline of stages.

The model is written as usual: blocks in an nn.ModuleList, a causal mask, the head tied to the
embedding, and a sample at each epoch's end. What makes it a pipeline is one argument, in `main`:

    L.Trainer(devices=2, strategy=GPipeStrategy(chunks=8, step="micro-batch"))

The embedding and the head stand outside the blocks. With step="micro-batch" the first and the last
stage hold them, and no stage computes the logits of more than one micro-batch at a time.
"""

import argparse
import math
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
from common import Cost, add_options, one_cycle
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy


class Text(L.LightningDataModule):
    """Characters of a text, cut into pieces; the last tenth is for validation."""

    def __init__(self, file: Path | None, length: int, batch_size: int) -> None:
        super().__init__()
        text = file.read_text() if file else "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        numbers = {character: i for i, character in enumerate(self.characters)}
        codes = torch.tensor([numbers[character] for character in text])
        pieces = codes[: (len(codes) - 1) // length * length].view(-1, length)
        following = codes[1 : pieces.numel() + 1].view(-1, length)
        cut = len(pieces) * 9 // 10
        self.train = TensorDataset(pieces[:cut], following[:cut])
        self.val = TensorDataset(pieces[cut:], following[cut:])
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def unigram_perplexity(self) -> float:
        """The perplexity of a model that knows how often each character occurs, and no more."""
        counts = Counter(self.train.tensors[1].flatten().tolist())
        total = sum(counts.values()) + len(self.characters)
        unseen = self.val.tensors[1].flatten().tolist()
        logs = [math.log((counts[code] + 1) / total) for code in unseen]
        return math.exp(-sum(logs) / len(logs))


class Block(nn.Module):
    """Attention to what came before, and a multi-layer perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask)[0]
        return hidden + self.mlp(self.norm2(hidden))


class GPT(L.LightningModule):
    """An ordinary LightningModule. The strategy cuts its list of blocks into stages."""

    def __init__(
        self,
        vocabulary: int,
        length: int = 64,
        width: int = 96,
        blocks: int = 6,
        heads: int = 4,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=codes.device).triu(1)
        places = torch.arange(length, device=codes.device)
        hidden = self.embedding(codes) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        codes, following = batch
        loss = nn.functional.cross_entropy(self(codes).flatten(0, 1), following.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        codes, following = batch
        loss = nn.functional.cross_entropy(self(codes).flatten(0, 1), following.flatten())
        self.log("val_loss", loss, prog_bar=True)

    @torch.no_grad()
    def generate(self, codes: Tensor, count: int) -> Tensor:
        """Go on from codes [batch, length]."""
        generator = torch.Generator(codes.device).manual_seed(0)
        for _ in range(count):
            logits = self(codes[:, -self.hparams.length :])[:, -1]
            following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            codes = torch.cat([codes, following], dim=1)
        return codes

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        start = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        codes = self.generate(start, 60)[0, 1:].tolist()
        characters = self.trainer.datamodule.characters
        self.print("Sample:", repr("".join(characters[code] for code in codes)))

    def configure_optimizers(self) -> dict:
        return one_cycle(self, self.hparams.learning_rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on English text, cut into a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--file", type=Path, help="text; without it that of Python's own help")
    add_options(parser, chunks=8, epochs=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    L.seed_everything(1)
    data = Text(arguments.file, length=64, batch_size=64)
    model = GPT(len(data.characters))
    cost = Cost()
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=arguments.stages,
        strategy=GPipeStrategy(chunks=arguments.chunks, step="micro-batch"),
        max_epochs=arguments.epochs,
        logger=CSVLogger("logs", name="language_model"),
        callbacks=[cost],
        log_every_n_steps=5,
    )
    trainer.fit(model, data)
    summarize(trainer, data, cost)


@rank_zero_only
def summarize(trainer: L.Trainer, data: Text, cost: Cost) -> None:
    perplexity = math.exp(trainer.callback_metrics["val_loss"])
    print(f"Perplexity:          {perplexity:.7f}")
    print(f"Unigram perplexity:  {data.unigram_perplexity():.4f}")
    print(cost)
    print(f"Logs:                {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
