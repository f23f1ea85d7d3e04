"""What the contestants train: a list of layers, a mini-batch and a loss."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.amoebanet import amoebanet_d


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        name: For the table.
        layers: Makes the layers of the backbone.
        batch: A mini-batch, input and target, for a number of micro-batches.
        loss: Of output and target, a mean over samples.
        balance: Numbers of layers for a number of stages.
    """

    name: str
    layers: Callable[[], list[nn.Module]]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    balance: Callable[[int], Sequence[int]]

    def stages(self, count: int) -> list[nn.Sequential]:
        """The layers as so many pieces."""
        layers, pieces = self.layers(), []
        for length in self.balance(count):
            pieces.append(nn.Sequential(*layers[:length]))
            layers = layers[length:]
        return pieces


def with_balance(workload: Workload, stages: int) -> Workload:
    """The same with its balances found already, in a process of its own.

    What computes before it forks may leave locks behind.
    """
    counts = [stages, *([2 * stages] if len(workload.layers()) >= 2 * stages else [])]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_balances, args=(workload, counts, theirs))
    process.start()
    theirs.close()
    known: dict[int, list[int]] = ours.recv()
    process.join()
    return replace(workload, balance=known.__getitem__)


def _balances(workload: Workload, counts: Sequence[int], pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send({count: [*workload.balance(count)] for count in counts})


def _evenly(count: int) -> Callable[[int], list[int]]:
    def balance(stages: int) -> list[int]:
        ends = [count * (k + 1) // stages for k in range(stages)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    return balance


# -------------------------------------------------------------------------- real compute


def transformer(blocks: int = 4, width: int = 256, length: int = 128, batch: int = 32) -> Workload:
    """Encoder blocks with causal attention, all alike."""

    def layers() -> list[nn.Module]:
        return [
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        ]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, length, width), torch.randn(batch, length, width)

    return Workload("Transformer", layers, data, nn.functional.mse_loss, _evenly(blocks))


class ConvBlock(nn.Sequential):
    """A convolution, batch norm and ReLU."""

    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU()
        )


class Head(nn.Sequential):
    """Classifies images."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def conv_net(batch: int = 64, size: int = 32) -> Workload:
    """Convolutions with batch norm, 13 blocks of unequal cost."""
    widths = [3, 32, 32, 48, 48, 64, 64, 96, 96, 128, 128, 160, 160, 192]
    strides = [1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1]

    def layers() -> list[nn.Module]:
        blocks: list[nn.Module] = [
            ConvBlock(given, made, stride)
            for given, made, stride in zip(widths, widths[1:], strides, strict=False)
        ]
        return [*blocks, Head(widths[-1])]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))

    return Workload(
        "conv net", layers, data, nn.functional.cross_entropy, _by_time(layers, data, batch // 8)
    )


def amoebanet(batch: int = 32, cells: int = 6, width: int = 32, size: int = 64) -> Workload:
    """A small AmoebaNet-D; tuples cross the stages."""

    def layers() -> list[nn.Module]:
        return [*amoebanet_d(cells, width, 10)]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))

    return Workload(
        "AmoebaNet-D", layers, data, nn.functional.cross_entropy, _by_time(layers, data, batch // 8)
    )


def language_model(
    blocks: int = 8,
    width: int = 256,
    vocabulary: int = 50257,
    length: int = 64,
    batch: int = 32,
) -> Workload:
    """A Transformer with its vocabulary on both sides, of which the ends hold the most."""

    def layers() -> list[nn.Module]:
        inner = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        ]
        return [nn.Embedding(vocabulary, width), *inner, nn.Linear(width, vocabulary)]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, vocabulary, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def balance(stages: int) -> list[int]:
        inner = _evenly(blocks)(stages)
        inner[0] += 1
        inner[-1] += 1
        return inner

    return Workload("language model", layers, data, loss, balance)


def _by_time(
    layers: Callable[[], list[nn.Module]],
    data: Callable[[int], tuple[Tensor, Tensor]],
    samples: int,
) -> Callable[[int], Sequence[int]]:
    """A balance by measured times of the layers, forward and backward, the same for everybody."""
    known: dict[int, list[int]] = {}

    def balance(stages: int) -> Sequence[int]:
        if stages not in known:
            known[stages] = _cut(_layer_times(layers(), data(8)[0][:samples]), stages)
        return known[stages]

    return balance


def _layer_times(layers: list[nn.Module], x: Any, repeats: int = 7) -> list[float]:
    """Seconds of a forward, a recompute and a backward of every layer, the medians."""
    times = []
    for layer in layers:
        found = []
        for _ in range(repeats):
            given = _leaves(x)
            start = time.perf_counter()
            y = layer(given)
            middle = time.perf_counter()
            total = sum(t.sum() for t in (y if isinstance(y, tuple) else (y,)))
            torch.autograd.backward(total)
            found.append(2 * (middle - start) + time.perf_counter() - middle)
        x = y
        times.append(sorted(found)[repeats // 2])
    return times


def _leaves(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_leaves, x))
    return x.detach().requires_grad_(x.is_floating_point())


def _cut(times: Sequence[float], stages: int) -> list[int]:
    """The cut with the shortest longest piece."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for k in range(1, stages + 1):
        for end in range(k, len(times) + 1):
            found = []
            for start in range(k - 1, end):
                if (k - 1, start) in best:
                    longest, lengths = best[k - 1, start]
                    longest = max(longest, sum(times[start:end]))
                    found.append((longest, [*lengths, end - start]))
            best[k, end] = min(found)
    return best[stages, len(times)][1]


# -------------------------------------------------------------------------- emulated devices

#: Seconds of the work of this process since it last told, by kind.
_SPENT: dict[str, list[float]] = defaultdict(list)


def notes() -> dict[str, tuple[float, int]]:
    """The mean seconds of each kind of work in this process, and how often, since the last call."""
    found = {kind: (statistics.mean(spent), len(spent)) for kind, spent in _SPENT.items()}
    _SPENT.clear()
    return found


@contextmanager
def timed(kind: str) -> Iterator[None]:
    """Note how long the work inside takes."""
    start = time.perf_counter()
    yield
    _SPENT[kind].append(time.perf_counter() - start)


def _sleep(kind: str, seconds: float) -> None:
    with timed(kind):
        time.sleep(seconds)


class _Input(torch.autograd.Function):
    """A forward, and the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep("slept F", seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep("slept I", ctx.seconds)
        return gradient.clone(), None


class _Weight(torch.autograd.Function):
    """The gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep("slept W", ctx.seconds)
        return gradient.clone(), None


class SleepingLayer(nn.Module):
    """Sleeps where a device would compute: one unit forward, two backward."""

    def __init__(self, width: int, unit_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.unit_s = unit_s

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # the first stage works as long as the others
        result: Tensor = _Input.apply(x, self.unit_s) * _Weight.apply(self.weight, self.unit_s)
        return result


class EmptyLayer(nn.Module):
    """Does next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def empty(layers: int = 2, width: int = 16, samples: int = 1) -> Workload:
    """Layers that do next to nothing: what is left is the engine."""

    def make() -> list[nn.Module]:
        return [EmptyLayer(width) for _ in range(layers)]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        return torch.ones(samples * chunks, width), torch.ones(samples * chunks, width)

    return Workload("empty layers", make, data, nn.functional.mse_loss, _evenly(layers))


def emulated(layers: int, unit_s: float, width: int = 64, samples: int = 4) -> Workload:
    """Layers that sleep: any number of stages runs truly in parallel on few cores."""

    def make() -> list[nn.Module]:
        return [SleepingLayer(width, unit_s) for _ in range(layers)]

    def data(chunks: int) -> tuple[Tensor, Tensor]:
        return torch.ones(samples * chunks, width), torch.ones(samples * chunks, width)

    return Workload("emulated", make, data, nn.functional.mse_loss, _evenly(layers))
