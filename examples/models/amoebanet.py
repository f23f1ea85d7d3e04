"""AmoebaNet-D (L, D) of the GPipe paper as a sequence of cells.

The genotype is that of Real et al. 2018. A cell has five blocks of two operations, each of which
reads one of the states before it, and gives (its output, its input) to the next cell: two tensors
cross from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

_States: TypeAlias = tuple[Tensor, Tensor]
_Operation: TypeAlias = tuple[int, str]  # the state it reads, and its kind

NORMAL: tuple[_Operation, ...] = (
    (1, "conv 1"), (1, "max 3"),
    (1, "none"), (0, "conv 1x7"),
    (0, "conv 1"), (0, "conv 1x7"),
    (2, "max 3"), (2, "none"),
    (1, "average 3"), (5, "conv 1"),
)  # fmt: skip
NORMAL_OUT = (0, 3, 4, 6)
REDUCTION: tuple[_Operation, ...] = (
    (0, "max 2"), (0, "max 3"),
    (2, "none"), (1, "conv 3"),
    (2, "conv 1x7"), (2, "max 3"),
    (3, "none"), (1, "max 2"),
    (2, "average 3"), (3, "conv 1"),
)  # fmt: skip
REDUCTION_OUT = (4, 5, 6)


class ReluConv(nn.Sequential):
    """ReLU, convolution, batch norm."""

    def __init__(
        self,
        given: int,
        made: int,
        kernel: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
    ) -> None:
        pair = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = pair[0] // 2, pair[1] // 2
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(given, made, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(made),
        )


class FactorizedReduction(nn.Module):
    """Halves height and width by two convolutions, one on the image shifted by a pixel."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(given, made // 2, 1, 2, bias=False)
        self.other = nn.Conv2d(given, made // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(x)
        shifted = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        result: Tensor = self.norm(torch.cat([self.one(x), self.other(shifted)], 1))
        return result


def _operation(kind: str, width: int, stride: int) -> nn.Module:
    quarter = width // 4
    match kind:
        case "none":
            return nn.Identity() if stride == 1 else FactorizedReduction(width, width)
        case "max 3":
            return nn.MaxPool2d(3, stride, 1)
        case "max 2":
            return nn.MaxPool2d(2, stride, 0)
        case "average 3":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "conv 1":
            return ReluConv(width, width, 1, stride)
        case "conv 3":
            return nn.Sequential(
                ReluConv(width, quarter), ReluConv(quarter, quarter, 3, stride),
                ReluConv(quarter, width),
            )  # fmt: skip
        case _:
            return nn.Sequential(
                ReluConv(width, quarter),
                ReluConv(quarter, quarter, (1, 7), (1, stride)),
                ReluConv(quarter, quarter, (7, 1), (stride, 1)),
                ReluConv(quarter, width),
            )


class Cell(nn.Module):
    """A cell.

    Args:
        given: Channels of its two inputs.
        width: Channels inside.
        genotype: Its operations.
        out: The states that are its output.
        halves: Whether it is a reduction.
        was_halved: Whether the cell before was one.
    """

    def __init__(
        self,
        given: tuple[int, int],
        width: int,
        genotype: Sequence[_Operation],
        out: Sequence[int],
        halves: bool,
        was_halved: bool,
    ) -> None:
        super().__init__()
        self.now = ReluConv(given[0], width)
        self.before: nn.Module = (
            FactorizedReduction(given[1], width) if was_halved else ReluConv(given[1], width)
        )
        self.operations = nn.ModuleList(
            _operation(kind, width, 2 if halves and place < 2 else 1) for place, kind in genotype
        )
        self._places, self._out = [place for place, _ in genotype], tuple(out)
        self.channels = width * len(out)

    def forward(self, inputs: _States) -> _States:
        x, before = inputs
        states = [self.now(x), self.before(before)]
        for i in range(0, len(self._places), 2):
            one, other = (self.operations[j](states[self._places[j]]) for j in (i, i + 1))
            states.append(one + other)
        return torch.cat([states[i] for i in self._out], 1), x


class Stem(nn.Module):
    """The first convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> _States:
        y = self.norm(self.conv(x))
        return y, y.clone()


class Classifier(nn.Module):
    """The mean over the image, and a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, inputs: _States) -> Tensor:
        result: Tensor = self.linear(inputs[0].mean((2, 3)))
        return result


def amoebanet_d(cells: int, width: int, classes: int, channels: int = 3) -> nn.Sequential:
    """AmoebaNet-D (L, D): ``cells`` + 6 layers, from images [batch, channels, H, W] to logits.

    Height and width are halved five times; of an image of 32 pixels one is left.

    Args:
        cells: L, the number of normal cells, a multiple of 3.
        width: D; cells begin with a quarter of it, and it doubles at each reduction.
        classes: Of images.
        channels: Of an image.
    """
    if cells % 3:
        raise ValueError(f"AmoebaNet-D has a multiple of 3 normal cells, got cells={cells}")
    inside = width // 4
    layers: list[nn.Module] = [Stem(channels, inside)]
    given, was_halved = (inside, inside), False
    third = [False] * (cells // 3)
    for halves in (True, True, *third, True, *third, True, *third):
        inside *= 2 if halves else 1
        genotype, out = (REDUCTION, REDUCTION_OUT) if halves else (NORMAL, NORMAL_OUT)
        cell = Cell(given, inside, genotype, out, halves, was_halved)
        layers.append(cell)
        given, was_halved = (cell.channels, given[0]), halves
    return nn.Sequential(*layers, Classifier(given[0], classes))
