"""Train AmoebaNet-D, the image model of the GPipe paper, or a residual network.

    python examples/images.py                              # digits that come with scikit-learn
    python examples/images.py --dataset CIFAR10 --download # a data set of torchvision
    python examples/images.py --folder PATH                # PATH/train/CLASS/*, PATH/val/CLASS/*

The models, in `models/amoebanet.py` and `models/resnet.py`, are an nn.Sequential each. What makes
a pipeline of it is one argument, in `main`:

    L.Trainer(devices=2, strategy=GPipeStrategy(chunks=4))
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from common import Cost, add_options, one_cycle
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from models.amoebanet import amoebanet_d
from models.resnet import resnet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpipe import GPipeStrategy

MODELS = {"amoebanet": amoebanet_d, "resnet": resnet}


def digits(size: int) -> list[Dataset]:
    """1797 real handwritten digits of 8 x 8 pixels, enlarged; the last 297 are for validation."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, (size, size), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.tensor(found.target)
    parts = [TensorDataset(images[cut], labels[cut]) for cut in (slice(1500), slice(1500, None))]
    for part in parts:
        part.targets = part.tensors[1]  # where data sets of torchvision have them
    return parts


def of_torchvision(arguments: argparse.Namespace) -> list[Dataset]:
    """One of its data sets, or folders of images: training and validation."""
    from torchvision import datasets
    from torchvision.transforms import v2

    sizes = v2.Resize(arguments.size), v2.CenterCrop(arguments.size)
    transform = v2.Compose([v2.ToImage(), v2.RGB(), *sizes, v2.ToDtype(torch.float32, scale=True)])
    if arguments.folder:
        parts = (arguments.folder / part for part in ("train", "val"))
        return [datasets.ImageFolder(part, transform) for part in parts]
    kind, options = getattr(datasets, arguments.dataset), {"download": arguments.download}
    return [kind(arguments.root, train, transform, **options) for train in (True, False)]


class Images(L.LightningDataModule):
    """Images [3, size, size], each with its class."""

    def __init__(self, train: Dataset, val: Dataset, batch_size: int = 64) -> None:
        super().__init__()
        self.train, self.val, self.batch_size = train, val, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def most_frequent(self) -> float:
        """The accuracy of always answering the class that training has most of."""
        answer = torch.as_tensor(self.train.targets).mode().values
        return (torch.as_tensor(self.val.targets) == answer).float().mean().item()


class Classifier(L.LightningModule):
    """An ordinary LightningModule around one of the models."""

    def __init__(
        self, model: str, depth: int, width: int, classes: int, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = MODELS[model](depth, width, classes)
        self.val_accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.layers(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict:
        return one_cycle(self, self.hparams.learning_rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train an image model, cut into a pipeline of stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sets = ["digits", "MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100"]
    parser.add_argument("--dataset", choices=sets, default="digits", help="the images")
    parser.add_argument("--root", type=Path, default="data", help="where a data set's files are")
    parser.add_argument("--download", action="store_true", help="download them if they aren't")
    parser.add_argument("--folder", type=Path, help="folders of images in place of a data set")
    parser.add_argument("--size", type=int, default=32, help="sides of the images, in pixels")
    parser.add_argument("--model", choices=[*MODELS], default="amoebanet", help="what is trained")
    parser.add_argument(
        "--depth", type=int, default=3, help="normal cells of AmoebaNet-D, or blocks of each size"
    )
    parser.add_argument("--width", type=int, default=32, help="D of AmoebaNet-D, or first channels")
    add_options(parser, chunks=4, epochs=5)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    L.seed_everything(1)
    own = arguments.dataset == "digits" and not arguments.folder
    data = Images(*(digits(arguments.size) if own else of_torchvision(arguments)))
    classes = len(set(torch.as_tensor(data.train.targets).tolist()))
    model = Classifier(arguments.model, arguments.depth, arguments.width, classes)
    cost = Cost()
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=arguments.stages,
        strategy=GPipeStrategy(chunks=arguments.chunks),
        max_epochs=arguments.epochs,
        logger=CSVLogger("logs", name="images"),
        callbacks=[cost],
        log_every_n_steps=5,
    )
    trainer.fit(model, data)
    summarize(trainer, data, cost)


@rank_zero_only
def summarize(trainer: L.Trainer, data: Images, cost: Cost) -> None:
    print(f"Loss:                {trainer.callback_metrics['val_loss']:.7f}")
    print(f"Accuracy:            {trainer.callback_metrics['val_accuracy']:.4f}")
    print(f"Most frequent class: {data.most_frequent():.4f}")
    print(cost)
    print(f"Logs:                {trainer.logger.log_dir}")


if __name__ == "__main__":
    main()
