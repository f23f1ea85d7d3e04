"""Train T(L, H, A), the translation model of the GPipe paper, character by character.

    python examples/translation.py                           # 1076 English verses, into Spanish
    python examples/translation.py --file PAIRS.tsv          # a pair a line: source, tab, target
    python examples/translation.py --file TEXT.de TEXT.en    # line by line

The model, in `models/translation.py`, is one nn.Sequential: encoder layers, then decoder layers,
between which the states of both texts and a mask are handed on. What makes a pipeline of it is one
argument, in `main`:

    L.Trainer(devices=2, strategy=GPipeStrategy(chunks=4, step="micro-batch"))
"""

import argparse
import itertools
from pathlib import Path

import lightning as L
import torch
from common import Cost, add_options, one_cycle
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from models.translation import translation
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lightning_gpipe import GPipeStrategy

VERSES = Path(__file__).parent / "data" / "verses.tsv"
PADDING, BEGIN, END, UNKNOWN = range(4)
Batch = tuple[Tensor, Tensor, Tensor]  # source, target, what follows each token of the target


def read(files: list[Path]) -> list[tuple[str, str]]:
    """The first two columns of one file, or the lines of two."""
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files]
    if len(files) == 1:
        return [tuple(line.split("\t")[:2]) for line in lines[0]]
    return [*zip(*lines, strict=True)]


class Pairs(L.LightningDataModule):
    """Sentences of two languages as characters; every tenth pair is for validation."""

    def __init__(self, files: list[Path], longest: int, batch_size: int = 32) -> None:
        super().__init__()
        pairs = [pair for pair in read(files) if max(map(len, pair)) <= longest]
        self.length = 1 + max(len(text) for pair in pairs for text in pair)
        train = [pair for i, pair in enumerate(pairs) if i % 10]
        self.characters = sorted({c for pair in train for text in pair for c in text})
        self.numbers = {c: i for i, c in enumerate(self.characters, UNKNOWN + 1)}
        self.train, self.val = self.encode(train), self.encode(pairs[::10])
        self.batch_size = batch_size

    def encode(self, pairs: list[tuple[str, str]]) -> TensorDataset:
        def padded(rows: list[list[int]]) -> Tensor:
            return torch.tensor([row + [PADDING] * (self.length - len(row)) for row in rows])

        sources, targets = (
            [[self.numbers.get(c, UNKNOWN) for c in text] for text in texts]
            for texts in zip(*pairs, strict=True)
        )
        begun, ended = [[BEGIN, *row] for row in targets], [[*row, END] for row in targets]
        return TensorDataset(padded(sources), padded(begun), padded(ended))

    def decode(self, codes: list[int]) -> str:
        text = itertools.takewhile(lambda code: code not in (END, PADDING), codes)
        return "".join(self.characters[i - UNKNOWN - 1] if i > UNKNOWN else "?" for i in text)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def baselines(self) -> tuple[float, float]:
        """The accuracy of the most frequent token, and that of copying the source."""
        train, (source, _, following) = self.train.tensors[2], self.val.tensors
        counts, answer = following != PADDING, train[train != PADDING].mode().values
        frequent, copied = following[counts] == answer, following[counts] == source[counts]
        return frequent.float().mean().item(), copied.float().mean().item()


class Translator(L.LightningModule):
    """An ordinary LightningModule around the model."""

    def __init__(
        self,
        vocabulary: int,
        layers: int = 2,
        hidden: int = 512,
        heads: int = 2,
        width: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 4e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = translation(
            layers, hidden, heads, width, vocabulary, PADDING, dropout, scale_feed_forward=True
        )
        self.val_accuracy = MulticlassAccuracy(vocabulary, average="micro", ignore_index=PADDING)
        self.val_perplexity = Perplexity(ignore_index=PADDING)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        source, target, following = batch
        logits = self.layers((source, target))
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), following.flatten(), ignore_index=PADDING
        )
        self.log("train_loss", loss, prog_bar=True)
        # micro-batches count by their tokens: so the loss is a mean over those of the mini-batch
        return {"loss": loss, "weight": (following != PADDING).sum()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        source, target, following = batch
        logits = self.layers((source, target))
        self.val_accuracy(logits.flatten(0, 1), following.flatten())
        self.val_perplexity(logits, following)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity, prog_bar=True)

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Translate [batch, length], each time by the most likely token."""
        target = torch.full_like(source, PADDING)
        target[:, 0] = BEGIN
        for place in range(1, source.shape[1]):
            target[:, place] = self.layers((source, target))[:, place - 1].argmax(-1)
        return target[:, 1:]

    def on_validation_epoch_end(self) -> None:
        if self.trainer.current_epoch + 1 < self.trainer.max_epochs:
            return
        data = self.trainer.datamodule
        source = data.val.tensors[0][:5].to(self.device)
        for given, made in zip(source.tolist(), self.translate(source).tolist(), strict=True):
            self.print(f"Sample: {data.decode(given)} -> {data.decode(made)}")

    def configure_optimizers(self) -> dict:
        return one_cycle(self, self.hparams.learning_rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a translation model, cut into a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--file", type=Path, nargs="+", help="one or two; without them verses")
    parser.add_argument(
        "--longest", type=int, default=60, help="characters; pairs with a longer text are left out"
    )
    parser.add_argument("--layers", type=int, default=2, help="L, of encoder and decoder each")
    parser.add_argument("--hidden", type=int, default=512, help="H, of the feed-forward parts")
    parser.add_argument("--heads", type=int, default=2, help="A, of attention, 64 channels each")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    add_options(parser, chunks=4, epochs=15)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    L.seed_everything(1)
    data = Pairs(arguments.file or [VERSES], arguments.longest)
    sizes = arguments.layers, arguments.hidden, arguments.heads, arguments.width
    model = Translator(len(data.characters) + UNKNOWN + 1, *sizes)
    cost = Cost()
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=arguments.stages,
        strategy=GPipeStrategy(chunks=arguments.chunks, step="micro-batch"),
        max_epochs=arguments.epochs,
        logger=CSVLogger("logs", name="translation"),
        callbacks=[cost],
        log_every_n_steps=5,
    )
    trainer.fit(model, data)
    summarize(trainer, data, cost)


@rank_zero_only
def summarize(trainer: L.Trainer, data: Pairs, cost: Cost) -> None:
    frequent, copied = data.baselines()
    print(f"Perplexity:          {trainer.callback_metrics['val_perplexity']:.7f}")
    print(f"Accuracy of tokens:  {trainer.callback_metrics['val_accuracy']:.4f}")
    print(f"Most frequent token: {frequent:.4f}")
    print(f"Copy of the source:  {copied:.4f}")
    print(cost)
    print(f"Logs:                {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
