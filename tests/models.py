"""Modules and data that the tests train."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 6


class Module(L.LightningModule):
    """A backbone of linear layers, trained in double precision; subclasses vary it."""

    samples = 8

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.build()
        self.double()

    def build(self) -> None:
        self.backbone = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        )

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        shape, kind = (2, 15 * self.samples, WIDTH), torch.float64
        x, y = torch.randn(shape, generator=generator, dtype=kind, device="cpu")
        return DataLoader(TensorDataset(x, y), batch_size=self.samples)


class Around(Module):
    """Modules before and after the backbone."""

    def build(self) -> None:
        super().build()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.backbone(self.before(x)))


class Skip(Around):
    """A skip connection around the backbone, from behind the first module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return self.after(self.backbone(h) + h)


class TwoCalls(Around):
    """Two calls in one loss that share what stands before them."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.before(x)
        first, second = self.backbone(h), self.backbone(2 * h)
        return nn.functional.mse_loss(self.after(first), y) + (second - y).abs().mean()


class Chained(Around):
    """A call on the output of another, whose output the loss reads too."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.backbone(self.before(x))
        second = self.backbone(self.after(first))
        third = self.backbone(second + first)
        return nn.functional.mse_loss(third, y) + second.square().mean() + first.sin().mean()


class ChainedAndDropped(Around):
    """Calls on the output of another, which nobody keeps."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for _ in range(3):
            h = self.backbone(h)
        return self.after(h)


class Shared(Around):
    """One weight in the first and last layer of the backbone, another inside and outside."""

    def build(self) -> None:
        super().build()
        self.backbone[4].weight = self.backbone[0].weight
        self.after.weight = self.backbone[2].weight


class SameModule(Module):
    """One module twice in the backbone."""

    def build(self) -> None:
        first = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), first)


class InPlace(Module):
    """In-place layers at every cut, the backbone's input and output changed in place too."""

    def build(self) -> None:
        pairs = ((nn.LeakyReLU(0.3, inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.backbone = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x.clone()).mul_(2).add_(1)


class Trees(Module):
    """Boundaries of tuples, dicts, None, int64 and bool tensors, numbers and views."""

    class Block(nn.Module):
        def __init__(self, odd: bool) -> None:
            super().__init__()
            self.odd = odd
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Any) -> Any:
            if isinstance(value, dict):
                h, mask, index, extra = (
                    value["h"].T,
                    value["flags"][0],
                    value["flags"][1],
                    value["extra"],
                )
            else:
                h, (mask, index, extra, _) = value
            scale = extra[2]
            h = torch.where(mask, self.linear(h), h).tanh() * scale
            h = h + index.unsqueeze(1) * extra[0].mean(1, keepdim=True)
            kept = h.mean(1, keepdim=True).expand(-1, WIDTH)
            if self.odd:
                return {"h": h.T, "flags": [mask, index + 1], "extra": (kept, None, scale)}
            return h, (mask, index, (kept, None, scale), "text")

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.Block(bool(i % 2)) for i in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        mask, index = x > -0.5, torch.arange(len(x), device=x.device) % 3
        h, (mask, index, (kept, nothing, scale), text) = self.backbone(
            (x, (mask, index, (x[:, :1].expand(-1, WIDTH), None, 0.5), "text"))
        )
        if (mask.dtype, index.dtype, nothing, scale, text) != (
            torch.bool,
            torch.int64,
            None,
            0.5,
            "text",
        ):
            raise AssertionError("the tree came back changed")
        return h + kept


class Lengths(Module):
    """Sequences whose length differs from step to step, with a mask that isn't split."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Any) -> Any:
            h, mask = value
            return torch.tanh(mask @ self.linear(h)), mask

    def build(self) -> None:
        self.backbone = nn.Sequential(*(self.Block() for _ in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        length = 3 + int(x[0, 0].abs() * 1000) % 3
        mask = torch.ones(length, length, dtype=x.dtype, device=x.device).tril()
        places = torch.arange(1, length + 1, device=x.device).view(-1, 1)
        h, _ = self.backbone((x.unsqueeze(1).expand(-1, length, -1) * places, mask))
        return nn.functional.mse_loss(h.mean(1), y)


class Flattened(Module):
    """A layer that merges samples and positions."""

    class Flatten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 2)

    def build(self) -> None:
        self.backbone = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), self.Flatten(), nn.Linear(2, 3), nn.Tanh()
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x).mean(1), y.reshape(-1, 2).mean(1))


class Ten(Module):
    """Ten samples, which no number of micro-batches but 1, 2, 5 and 10 divides."""

    samples = 10


class Few(Module):
    """Two samples: fewer than most numbers of micro-batches."""

    samples = 2


class Frozen(Around):
    """The first layers and the module before them are frozen, as in fine-tuning."""

    def build(self) -> None:
        super().build()
        self.before.requires_grad_(False)
        self.backbone[0].requires_grad_(False)
        self.backbone[2].requires_grad_(False)
