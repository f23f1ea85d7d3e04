"""Train a convolutional network on handwritten digits, cut into a pipeline of stages.

The LightningModule and the DataModule are as for one device. What makes it a pipeline is one
argument, in `main`:

    L.Trainer(devices=2, strategy=GPipeStrategy(chunks=8))
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy

LOGS = Path("logs")


class DigitsData(L.LightningDataModule):
    """1797 real handwritten digits of 8 x 8 pixels, which come with scikit-learn."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.train, self.val, self.test = random_split(dataset, [1297, 200, 300], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


def block(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    ]


class DigitsModel(L.LightningModule):
    """An ordinary LightningModule.

    Its backbone is the nn.Sequential that the strategy cuts into stages.
    """

    def __init__(self, width: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            *block(1, width),
            *block(width, width),
            nn.MaxPool2d(2),
            *block(width, 2 * width),
            *block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.05
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a convolutional network on real handwritten digits, cut into a pipeline"
        " of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--stages", type=int, default=gpus or 2, help="stages of the pipeline, one process each"
    )
    parser.add_argument(
        "--chunks", type=int, default=8, help="micro-batches that a mini-batch of 64 is split into"
    )
    parser.add_argument(
        "--checkpoint",
        choices=["always", "except_last", "never"],
        default="except_last",
        help="micro-batches whose activations are recomputed in the backward, to save memory",
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data")
    parser.add_argument(
        "--logger",
        choices=["csv", "wandb"],
        default="csv",
        help="where metrics go; wandb needs `pip install wandb`",
    )
    return parser.parse_args()


def make_logger(name: str) -> Logger:
    if name == "wandb":
        return WandbLogger(project="digits", save_dir=LOGS)
    return CSVLogger(LOGS, name="digits")


def main() -> None:
    arguments = parse_arguments()
    L.seed_everything(1)
    model, data = DigitsModel(), DigitsData()
    checkpoint = ModelCheckpoint(
        monitor="val_accuracy", mode="max", filename="digits-{epoch}-{val_accuracy:.3f}"
    )
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=arguments.stages,
        strategy=GPipeStrategy(chunks=arguments.chunks, checkpoint=arguments.checkpoint),
        max_epochs=arguments.epochs,
        logger=make_logger(arguments.logger),
        callbacks=[checkpoint],
        log_every_n_steps=5,
    )
    trainer.fit(model, data)
    trainer.test(model, data, ckpt_path="best", verbose=False)
    summarize(trainer, checkpoint)


@rank_zero_only
def summarize(trainer: L.Trainer, checkpoint: ModelCheckpoint) -> None:
    print(f"Test accuracy: {trainer.callback_metrics['test_accuracy']:.4f}")
    print(f"Checkpoint:    {checkpoint.best_model_path}")
    print(f"Logs:          {trainer.logger.log_dir or trainer.logger.save_dir}")


if __name__ == "__main__":
    main()
