"""Loops over blocks that do something with the hidden state between two of them."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model import between
from lightning_gpipe.model.sample_wise import Look
from tests import models
from tests.models import WIDTH
from tests.ranks import RankError, run_ranks
from tests.training import train, trainer


class Loop(models.Module):
    """A residual loop."""

    count = 5

    def build(self) -> None:
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block(i) for i in range(self.count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def block(self, i: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for i, block in enumerate(self.blocks):
            hidden = self.one(i, block, hidden)
        return self.head(hidden)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return hidden + block(hidden)


class ByForward(Loop):
    """Calls the forwards of blocks."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made: Tensor = block.forward(hidden)
        return made.tanh()


class WrapsForwards(ByForward):
    """Puts functions around the blocks' forwards, for a step or two."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.own = [block.forward for block in self.blocks]
            for i, block in enumerate(self.blocks):
                block.forward = partial(self.wrapped, i)
        if self.global_step == 3:
            for block, own in zip(self.blocks, self.own, strict=True):
                block.forward = own

    def wrapped(self, i: int, hidden: Tensor) -> Tensor:
        made: Tensor = self.own[i](hidden)
        return made * 1.5


class Drops(Loop):
    """Skips blocks, in each step others, also the first and the last ones."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for i, block in enumerate(self.blocks):
            if not self.is_dropped(i):
                hidden = self.one(i, block, hidden)
        return self.head(hidden)

    def is_dropped(self, i: int) -> bool:
        return self.training and not (i + self.global_step) % 3

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(block(self.norm(hidden)), 0.0).tanh()


class DropsWhole(Drops):
    """Has blocks that add their residuals themselves."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made: Tensor = block(hidden)
        return made


class DropsMost(Drops):
    """Leaves one block, or none."""

    def is_dropped(self, i: int) -> bool:
        return i != 2 * self.global_step


class DropsIndexed(Drops):
    """Counts, and never skips the last one; uses a hidden state behind the loop."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.before(x)]
        for i in range(self.count):
            if i == self.count - 1 or not self.is_dropped(i):
                hidden.append(self.blocks[i](hidden[-1]))
        return self.head(hidden[-1] + hidden[-2])


class DropsBehind(Drops):
    """Uses hidden states behind a loop that may skip the last block."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.before(x)]
        for i, block in enumerate(self.blocks):
            if not self.is_dropped(i):
                hidden.append(self.one(i, block, hidden[-1]))
        return self.head(sum(hidden[1:]) + hidden[0])


class DropsByChance(Drops):
    """Goes by random numbers, as LayerDrop does."""

    def is_dropped(self, i: int) -> bool:
        return self.training and bool(torch.rand([]) < 0.5)


class OutIndices(Loop):
    """Keeps what some blocks return."""

    kept: tuple[int, ...] = (3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.before(x), []
        for i, block in enumerate(self.blocks):
            hidden = block(hidden)
            if i in self.kept:
                found.append(hidden)
        return self.head(torch.stack(found).sum(0))


class OutOfThree(OutIndices):
    kept = 0, 2, 3


class Two(Loop):
    count = 2


class Activations(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden) if i == self.count - 1 else F.leaky_relu(block(hidden), 0.1)


class PreNorm(Loop):
    """A norm that all share, and constants."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        residual = hidden
        return (F.gelu(block(self.norm(hidden))) + residual) * 0.5


class Norms(Loop):
    """Norms in a list of their own, activations in place; as many samples as their width."""

    samples = WIDTH

    def build(self) -> None:
        super().build()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)
        self.activation, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            hidden = self.dropout(self.activation(norm(block(hidden))))
        return self.head(hidden)


class Gates(Loop):
    """Parameters and buffers of the model; as many samples as they are long."""

    samples = WIDTH

    def build(self) -> None:
        super().build()
        self.gates = nn.ParameterList(torch.full((WIDTH,), 0.5) for _ in self.blocks)
        self.register_buffer("scale", torch.arange(WIDTH) / WIDTH)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden) * self.gates[i].sigmoid() + hidden * self.scale


class InPlace(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        residual, hidden = hidden, block(hidden)
        hidden += residual
        return hidden.relu_()


class First(Loop):
    """Adds to each what the first was given, and what was made of the first's output."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = first = self.before(x)
        for i, block in enumerate(self.blocks):
            hidden = torch.tanh(block(hidden)) + first
            if i == 1:
                middle = hidden.sigmoid()
        return self.head(hidden * middle + first)


class Collected(Loop):
    """Uses all hidden states behind the loop."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.before(x), []
        for block in self.blocks:
            hidden = F.silu(block(hidden))
            found.append(hidden)
        return self.head(torch.stack(found, 1).mean(1) + found[1])


class CollectedForNothing(Loop):
    """Collects, and doesn't use, what has two rows for each sample."""

    def block(self, i: int) -> nn.Module:
        return Gathers(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.before(x), []
        for block in self.blocks:
            hidden, part = block(hidden)
            found.append(part)
        self.__dict__["collected"] = torch.stack(found)  # as in a tuple that is returned
        return self.head(hidden)


class Gathers(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), hidden.repeat_interleave(2, 0)


class UsesCollected(CollectedForNothing):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.collected.mean()


class Tags(CollectedForNothing):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden, part = block(hidden)
            part.kind = "attention"
        return self.head(hidden)


class Jumping(Loop):
    """Hands hidden states to blocks further on, as a U-Net does."""

    count = 6

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.before(x), []
        for i, block in enumerate(self.blocks):
            hidden = torch.relu(block(hidden if i < 3 else hidden + kept.pop()))
            if i < 3:
                kept.append(hidden)
        return self.head(hidden)


class Widths(Loop):
    """Blocks of several widths, and norms that go by them."""

    def block(self, i: int) -> nn.Module:
        return nn.Linear((WIDTH, 9)[i % 2], (9, WIDTH)[i % 2])

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        hidden = block(hidden)
        return F.layer_norm(hidden, hidden.shape[1:]) / hidden.size(-1)

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(9, WIDTH)


class Images(Loop):
    """Other orders of dimensions."""

    def build(self) -> None:
        super().build()
        self.channels = nn.Linear(1, 4)
        self.norm = nn.LayerNorm(4)

    def block(self, i: int) -> nn.Module:
        return nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.channels(x.unsqueeze(-1))
        for block in self.blocks:
            made = block(hidden.transpose(1, 2)).transpose(1, 2)
            hidden = self.norm(torch.where(made > 0, hidden + F.gelu(made), hidden))
        return hidden.mean(2)


class Masks(Loop):
    """A mask for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        mask, hidden = (x > 0).to(x.dtype), self.before(x)
        for block in self.blocks:
            hidden = block(hidden).masked_fill(mask == 0, 0.0) + hidden * mask
        return self.head(hidden)


class Sequence(PreNorm):
    """An ``nn.Sequential``."""

    def build(self) -> None:
        super().build()
        self.blocks: Any = nn.Sequential(*self.blocks)


class Children(Sequence):
    """Loops over the children of an ``nn.Sequential``."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks.children():
            hidden = block(hidden)
        return self.head(hidden)


class NamedChildren(Loop):
    """Loops over the children of an ``nn.ModuleList`` and their names."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for name, block in self.blocks.named_children():
            hidden = block(hidden) + int(name) * hidden
        return self.head(hidden)


class Slices(Sequence):
    """Calls slices of an ``nn.Sequential``, and uses what is between them behind it."""

    def forward(self, x: Tensor) -> Tensor:
        middle = self.blocks[:1](self.before(x))
        return self.head(self.blocks[1:](middle) + middle)


class Parts(Loop):
    """Calls the parts of blocks that can't be called."""

    def block(self, i: int) -> nn.Module:
        tail = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))
        return nn.ModuleList([nn.Linear(WIDTH, WIDTH), tail])

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        first, second = block
        assert len(block) == 2
        hidden = first(hidden).tanh() + hidden
        return second(self.norm(hidden)) + hidden


class TwoParts(Parts):
    count = 2


class FirstWithout(Parts):
    """The first block lacks a part, as that of FT-Transformer lacks a norm."""

    def block(self, i: int) -> nn.Module:
        parts = {"linear": nn.Linear(WIDTH, WIDTH), "tail": nn.Linear(WIDTH, WIDTH)}
        return nn.ModuleDict(parts | ({"norm": nn.LayerNorm(WIDTH)} if i else {}))

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made = block["norm"](hidden) if "norm" in block else hidden
        hidden = hidden + block["linear"](made).tanh()
        return block["tail"](hidden)


class LastWithout(FirstWithout):
    def block(self, i: int) -> nn.Module:
        return super().block(self.count - 1 - i)


class NamedParts(Parts):
    """One of them beside another, and one that is called twice."""

    def block(self, i: int) -> nn.Module:
        names = ("near", "far", "again")
        return nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        assert list(block) == [name for name, _ in block.items()]
        assert "far" in block
        made = block["near"](hidden) + block["far"](hidden).relu()
        return hidden + block["again"](torch.tanh(block["again"](made)))


class NestedParts(Parts):
    """Parts of parts, and tuples that they return."""

    def block(self, i: int) -> nn.Module:
        norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        return nn.ModuleList([nn.GRU(1, 4, batch_first=True), nn.Linear(4, 1, bias=False), norms])

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        recurrent, linear, (before, after) = block
        made, _ = recurrent(before(hidden).unsqueeze(-1))
        return hidden + after(linear(made).flatten(1))


class CollectedParts(Parts):
    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.before(x), []
        for i, block in enumerate(self.blocks):
            hidden = self.one(i, block, hidden)
            found.append(hidden)
        return self.head(sum(found))


class Concatenated(Loop):
    """Concatenates with what is known, and adds up."""

    def block(self, i: int) -> nn.Module:
        return nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, other = self.before(x), x.square()
        for i, block in enumerate(self.blocks):
            hidden = block(torch.cat([hidden, other], 1))
            if not i:
                total = torch.zeros_like(hidden)
            total += hidden.abs()
        return self.head(total)


class Remembers(Loop):
    """Uses hidden states, and what blocks return besides, of the step before."""

    def build(self) -> None:
        super().build()
        self.__dict__["kept"] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.before(x), []
        for i, block in enumerate(self.blocks):
            kept.append(hidden)
            hidden = block(hidden + self.kept[i].detach() if self.kept else hidden)
        self.__dict__["kept"] = kept
        return self.head(hidden)


class Asks(Loop):
    """Tells blocks apart by what they are."""

    def block(self, i: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH) if i % 2 else nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        assert (block is self.blocks[0]) == (not i)
        made = block(hidden)
        if type(block) in (nn.Linear, nn.Bilinear) and type(block).__name__ == "Linear":
            made = made.tanh()
        if {nn.Linear: False}.get(type(block), True):
            made = made + hidden
        return made if block is self.blocks[-1] else F.relu(made)


class AsksSequence(Asks):
    def build(self) -> None:
        super().build()
        self.blocks: Any = nn.Sequential(*self.blocks)


class ReadsLate(Loop):
    """Reads the shape of a block's input when the block has been called."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden).tanh().reshape(hidden.shape) * hidden.shape[-1] ** 0.1


class Rows(Loop):
    """Blocks that return something with a row for each sample beside the hidden state."""

    def block(self, i: int) -> nn.Module:
        return Coupling(WIDTH, WIDTH)


class Coupling(nn.Linear):
    """Of a normalizing flow: returns the logarithm of a determinant, too."""

    def forward(self, hidden: Tensor) -> Any:
        scale = super().forward(hidden).tanh()
        return hidden * scale.exp() + 1, scale.sum(1)


class Flow(Rows):
    """Adds up numbers of each sample, from nought; as many samples as it is wide."""

    samples = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), 0
        for block in self.blocks:
            hidden, part = block(hidden)
            total = total + part
        return self.head(hidden) - total.unsqueeze(1)


class FlowFromZeros(Rows):
    """The same in place, with a term for the hidden state, and all parts kept."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, total, parts = self.before(x), x.new_zeros(x.shape[0]), []
        for i, block in enumerate(self.blocks):
            hidden, part = block(hidden)
            assert part.shape == x.shape[:1]
            total = total + part
            total += (hidden if i else hidden * 2).square().mean(-1)
            parts.append(part)
        return self.head(hidden) + (total + torch.stack(parts, 1).mean(1))[:, None]


class Backcasts(Loop):
    """Subtracts what each block explains, and adds up what it forecasts, of another width."""

    def block(self, i: int) -> nn.Module:
        return Backcast(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, forecast = self.before(x), None
        for block in self.blocks:
            backcast, part = block(hidden)
            hidden = hidden - backcast
            forecast = part if forecast is None else forecast + part
        return self.head(torch.cat([hidden, hidden], 1)) + forecast.repeat(1, 2)

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(2 * WIDTH, WIDTH)


class Backcast(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return [made[:, :WIDTH], made[:, WIDTH::2]]


class Skips(Loop):
    """Skip connections of a stack of convolutions, into one sum."""

    def build(self) -> None:
        super().build()
        self.channels = nn.Conv1d(1, 4, 1)
        self.last = nn.Conv1d(3, 1, 1)

    def block(self, i: int) -> nn.Module:
        return Dilated(i)

    def forward(self, x: Tensor) -> Tensor:
        hidden, skips = self.channels(x.unsqueeze(1)), 0.0
        for block in self.blocks:
            hidden, skip = block(F.dropout(hidden, 0.0, self.training))
            skips = skips + skip[..., -WIDTH:]
        return self.last(F.relu(skips)).squeeze(1)


class Dilated(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.gated = nn.Conv1d(4, 8, 2, dilation=i + 1)
        self.residual, self.skip = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 3, 1)

    def forward(self, hidden: Tensor) -> Any:
        made = F.glu(self.gated(F.pad(hidden, (self.gated.dilation[0], 0))), 1)
        return hidden + self.residual(made), self.skip(made)


class Maps(Loop):
    """Keeps what blocks return besides, and asks whether there is something."""

    maps = True

    def block(self, i: int) -> nn.Module:
        return Attends(WIDTH, WIDTH, self.maps)

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = self.before(x), ()
        for block in self.blocks:
            outputs = block(hidden)
            hidden = outputs[0]
            if outputs[1] is not None:
                found += (outputs[1],)
        return self.head(hidden) + (torch.stack(found).mean((0, 2)) if found else 0)


class Attends(nn.Linear):
    def __init__(self, wide: int, width: int, maps: bool) -> None:
        super().__init__(wide, width)
        self.maps = maps

    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        maps = (made.unsqueeze(1) * hidden.unsqueeze(2)).softmax(-1)
        return made, (maps.transpose(1, 2) if self.maps else None)


class NoMaps(Maps):
    maps = False


class InTraining(Rows):
    """Blocks that return more in training."""

    def block(self, i: int) -> nn.Module:
        return Auxiliary(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), 0
        for block in self.blocks:
            if self.training:
                hidden, part = block(hidden)
                total = total + part
            else:
                hidden = block(hidden)
        return self.head(hidden + total)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Auxiliary(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return (made, made[:, :1].square()) if self.training else made


class Shapes(Loop):
    """Gives hidden states other shapes, by sizes that are read; pieces and parts of them."""

    def block(self, i: int) -> nn.Module:
        return nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x).view(x.size(0), 2, -1)
        for block in self.blocks:
            made = block(hidden)
            n, channels, length = made.shape
            first, second = made.reshape(n, channels * length).chunk(2, dim=-1)
            one, other = made.unbind(1)
            kept, _ = torch.split(made, [1, length - 1], 2)
            hidden = torch.stack((first * torch.sigmoid(other), second + one), 1)
            hidden = hidden + kept.expand(n, -1, length) + made[:, :, 1:2].contiguous()
            hidden = F.avg_pool1d(F.interpolate(hidden, scale_factor=2), 2).double()
        return self.head(hidden.flatten(1))


class Tokens(Loop):
    """Transformer layers; keeps the first token of each."""

    def build(self) -> None:
        super().build()
        self.embedding, self.token = nn.Linear(1, 4), nn.Parameter(torch.zeros(1, 1, 4))
        self.head = nn.Linear(4, WIDTH)

    def block(self, i: int) -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden, first = self.embedding(x.unsqueeze(-1)), []
        hidden = torch.cat([self.token.expand(len(hidden), -1, -1), hidden], 1)
        for block in self.blocks:
            hidden = block(hidden)
            first.append(hidden[:, 0])
        return self.head(torch.stack(first, 1).mean(1))


class Halves(Loop):
    """Two hidden states in turn, as in a reversible network."""

    def block(self, i: int) -> nn.Module:
        return nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.before(x).chunk(2, -1)
        for block in self.blocks:
            one, other = other, one + torch.tanh(block(other))
        return self.head(torch.cat([one, other], -1))


class TwoKept(Two):
    """Uses both hidden states behind a loop of two passes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.before(x), []
        for block in self.blocks:
            hidden = block(hidden)
            kept.append(hidden)
            hidden = hidden.relu()
        return self.head(hidden + F.pad(kept[0], (0, WIDTH - kept[0].shape[1])) + kept[1])


class Flows(nn.Sequential):
    """Loops over itself."""

    def forward(self, hidden: Tensor) -> Any:
        total = hidden.new_zeros(len(hidden))
        for layer in self:
            hidden, part = layer(hidden)
            total = total + part
        return hidden, total


class OwnLoop(Loop):
    """A sequence with a forward of its own."""

    def build(self) -> None:
        super().build()
        self.blocks: Any = Flows(*(Coupling(WIDTH, WIDTH) for _ in range(self.count)))

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.blocks(self.before(x))
        return self.head(hidden) + total.unsqueeze(1)


class Stack(nn.ModuleList):
    def forward(self, hidden: Tensor) -> Tensor:
        for i, layer in enumerate(self):
            hidden = layer(hidden) if i else layer(hidden).relu() + hidden
        return hidden


class OwnList(Loop):
    """A list with a forward."""

    def build(self) -> None:
        super().build()
        self.blocks = Stack(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.before(x)))


class Mixture(Rows):
    """Every second block returns something beside the hidden state, in other orders."""

    def block(self, i: int) -> nn.Module:
        return Ordered(WIDTH, WIDTH, ("", "ha", "ah")[i % 3])

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), 0
        for i, block in enumerate(self.blocks):
            made = block(hidden, i > 3)
            if isinstance(made, dict):
                hidden = made["hidden"]
                total = total + made["a"]
                if "twice" in made:
                    total = total + made["twice"]
            else:
                hidden = made
        return self.head(hidden) + total


class Ordered(nn.Linear):
    def __init__(self, wide: int, width: int, order: str) -> None:
        super().__init__(wide, width)
        self.order = order

    def forward(self, hidden: Tensor, twice: bool) -> Any:
        made = super().forward(hidden)
        found = {"hidden": made, "a": made[:, :1].tanh()}
        if self.order == "ah":
            found = {"a": found["a"], "hidden": made}
        if twice:
            found["twice"] = made[:, 1:2]
        return found if self.order else made


class Named(NamedTuple):
    hidden: Tensor
    parts: dict[str, Any]


class Structures(Rows):
    """Blocks that return tensors in tuples and dictionaries, by name."""

    def block(self, i: int) -> nn.Module:
        return Structured(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), 0
        for block in self.blocks:
            made = block(hidden)
            hidden = made.hidden + made.parts["doubled"][0]
            assert made.parts["none"] is None
            total = total + made.parts["mean"]
        return self.head(hidden) + total


class Structured(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        parts = {"none": None, "doubled": [2 * made], "mean": made.mean(1, keepdim=True)}
        return Named(made, parts)


class Dictionaries(Structures):
    def block(self, i: int) -> nn.Module:
        return InDictionary(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            made = block(hidden)
            hidden = made["hidden"] + made["attention"]
        return self.head(hidden)


class InDictionary(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return {"attention": made.softmax(-1), "hidden": made}


class Samples(Flow):
    """Goes backwards over the blocks in validation, as one that samples from a flow."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden, again = batch[0], batch[0]
        for block in reversed(self.blocks):
            hidden, _ = block(hidden)
        for block in self.blocks[::-1]:
            again, _ = block(again)
        torch.testing.assert_close(hidden, again)
        self.log("sampled", hidden.mean())

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Biases(Loop):
    """The first block returns a table for all, which is handed on beside hidden states."""

    def block(self, i: int) -> nn.Module:
        return Biased(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, table = self.before(x), None
        for block in self.blocks:
            made, table = block(hidden, table)
            hidden = hidden + made
        return self.head(hidden)


class Biased(nn.Linear):
    def forward(self, hidden: Tensor, table: Any) -> Any:
        table = self.weight[:1] if table is None else table
        return super().forward(hidden) + table, table


class KeepsStates(Loop):
    """Hands what a block has returned to the next one, in the next step."""

    def block(self, i: int) -> nn.Module:
        return Stateful(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, states = self.before(x), []
        for i, block in enumerate(self.blocks):
            before = self.__dict__.get("states")
            hidden, state = block(hidden, before[i].detach() if before else None)
            states.append(state)
        object.__setattr__(self, "states", states)
        return self.head(hidden)


class Stateful(nn.Linear):
    def forward(self, hidden: Tensor, state: Any) -> Any:
        made = super().forward(hidden if state is None else hidden + state)
        return made, made * 2


class SharedNorms(Parts):
    """Calls a part of a block twice with the same."""

    def block(self, i: int) -> nn.Module:
        width = WIDTH
        layers = nn.Linear(width, width), nn.Linear(width, width)
        return nn.ModuleList([nn.LayerNorm(width), *layers, None])

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        norm, first, second, nothing = block
        assert nothing is None
        return hidden + first(norm(hidden)) + second(norm(hidden))


class OtherParts(Parts):
    """Leaves out a part once."""

    left_out = 3

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        hidden = block[0](hidden)
        return hidden if i == self.left_out else block[1](hidden)


class FewerParts(OtherParts):
    """Leaves out the last one's."""

    left_out = 4


class OverSamples(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden) - hidden.mean(0, keepdim=True)


class OverAll(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden) * hidden.mean()


class BatchNorm(Loop):
    def build(self) -> None:
        super().build()
        self.norm: Any = nn.BatchNorm1d(WIDTH)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return self.norm(block(hidden))


class Aligned(Loop):
    """Would put samples beside the positions of others."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return (block(hidden) + hidden.unsqueeze(1)).mean(1)


class Decides(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        hidden = block(hidden)
        return hidden if (hidden > 0).any() else hidden + 1


class Writes(Loop):
    """Adds to a tensor that is known."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), torch.zeros_like(x)
        for block in self.blocks:
            hidden = block(hidden)
            total += hidden
        return total


class OtherMode(Loop):
    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        hidden = block(hidden)
        with torch.no_grad():
            return hidden * 2


class ChangesInput(Loop):
    """Changes what the first block was given after its call."""

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.before(x) * 1
        for i, block in enumerate(self.blocks):
            hidden = block(hidden)
            if not i:
                first.mul_(2)
        return self.head(hidden)


class Handed(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden  # the memory that it is given


class Shared(Loop):
    """Changes in place what a block has handed through."""

    def block(self, i: int) -> nn.Module:
        return Handed(WIDTH, WIDTH) if i else super().block(i)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made = block(hidden)
        return torch.relu_(made) + hidden if i else made


class Scalars(Rows):
    """A part of the loss that is one number."""

    def block(self, i: int) -> nn.Module:
        return Balanced(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.before(x), 0
        for block in self.blocks:
            hidden, part = block(hidden)
            total = total + part
        return self.head(hidden), total

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        made, total = self(x)
        return F.mse_loss(made, y) + total


class Balanced(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return made, made.square().mean()


class Turned(Scalars):
    """As many rows as samples, which aren't theirs."""

    samples = WIDTH

    def block(self, i: int) -> nn.Module:
        return Transposed(WIDTH, WIDTH)


class Transposed(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return made, made.t()


class Lists(Scalars):
    """As many numbers as a layer is wide."""

    def block(self, i: int) -> nn.Module:
        return Counted(WIDTH, WIDTH)


class Counted(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return made, made.mean(0)


class Objects(Loop):
    """Returns an object."""

    def block(self, i: int) -> nn.Module:
        return Logits(WIDTH, WIDTH)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden).logits


class Logits(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(hidden))


class NumberFirst(Scalars):
    def block(self, i: int) -> nn.Module:
        return Reversed(WIDTH, WIDTH)


class Reversed(Balanced):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden)[::-1]


class ByValues(Loop):
    """Returns another structure where the values are known."""

    def block(self, i: int) -> nn.Module:
        return Lately(WIDTH, WIDTH)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made = block(hidden)
        return made[0] if isinstance(made, tuple) else made


class Lately(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        made = super().forward(hidden)
        return made if hidden.is_meta else (made + 1, made)


class Roots(Scalars):
    def forward(self, x: Tensor) -> Any:
        hidden, total = self.before(x), 0
        for block in self.blocks:
            hidden, part = block(hidden)
            total = total + part.sqrt()
        return self.head(hidden), total


class Looking(Loop):
    """Returns two tensors, and looks at values, as sparse experts at who is sent to them."""

    def block(self, i: int) -> nn.Module:
        return Looks(WIDTH, WIDTH) if i % 2 else Experts()

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made, part = block(hidden)
        return made + part


class Looks(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), hidden if float(hidden.detach()[0, 0]) > -100 else -hidden


class Experts(nn.Module):
    """Sends each sample to one of three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> Any:
        scores = self.gate(hidden).softmax(-1)
        best, chosen = scores.max(-1, keepdim=True)
        made = torch.zeros_like(hidden)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if rows.tolist():
                made.index_add_(0, rows, expert(hidden[rows]) * best[rows])
        return made, scores.sum(-1, keepdim=True)


class Counting(Looking):
    def block(self, i: int) -> nn.Module:
        return Counts()


class Counts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = list[float]()

    def forward(self, hidden: Tensor) -> Any:
        self.calls += 1
        self.seen.append(float(hidden.detach().abs().sum()))
        return super().forward(hidden)


class Refuses(Looking):
    """Can't be tried."""

    def block(self, i: int) -> nn.Module:
        return RefusesZeros(WIDTH, WIDTH)


class RefusesZeros(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        assert hidden.detach().any()
        assert torch.is_grad_enabled()
        return super().forward(hidden), hidden


class Flags(Rows):
    """Asks its blocks for more in every second step."""

    def block(self, i: int) -> nn.Module:
        return Flagged(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, with_more = self.before(x), self.trainer.global_step % 2 == 1
        for block in self.blocks:
            made = block(hidden, with_more)
            hidden = made[0] + made[1] if with_more else made
        return self.head(hidden)


class Flagged(nn.Linear):
    def forward(self, hidden: Tensor, with_more: bool) -> Any:
        made = super().forward(hidden)
        return (made, hidden.tanh()) if with_more else made


class Picks(Loop):
    """Takes columns by a list."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        return block(hidden) + hidden[:, [-1]] * hidden[:, [0, 1, 2, 3, 4, 5]]


class AfterIdentity(Loop):
    """Changes in place what a block may have handed through."""

    def block(self, i: int) -> nn.Module:
        return Handed(WIDTH, WIDTH) if i == 2 else super().block(i)

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        before, hidden = hidden, block(hidden)
        if i:
            before += 1
        return hidden


class MayShare(Loop):
    """Changes in place what may be a copy of a hidden state, or that itself."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made = block(hidden)
        made.contiguous().add_(1)
        return made


class Changing(Rows):
    """Returns something else where the values are known."""

    def block(self, i: int) -> nn.Module:
        return Changed(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden, part = block(hidden)
            if part is not None:
                hidden = hidden + part
        return self.head(hidden)


class Changed(nn.Linear):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), None if hidden.is_meta else hidden.exp()


class KeepsLast(Loop):
    """Uses the last hidden state but one, in the next step."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for i, block in enumerate(self.blocks):
            if i == self.count - 1:
                given = (hidden,)
            hidden = block(hidden, *self.__dict__.get("kept", ()))
        self.__dict__["kept"] = given
        return self.head(hidden)

    def block(self, i: int) -> nn.Module:
        return Adds(WIDTH, WIDTH)


class Adds(nn.Linear):
    def forward(self, hidden: Tensor, other: Any = 0) -> Tensor:
        return super().forward(hidden) + other


class Whole(Loop):
    """Hands a dictionary from block to block."""

    def block(self, i: int) -> nn.Module:
        return OfDictionary(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        state: Any = {"hidden": hidden, "scale": 1 + x[:, :1].sigmoid(), "sums": (hidden, 0)}
        for block in self.blocks:
            state = block(state)
        return self.head(state["hidden"] + state["sums"][0]) * state["sums"][1]


class OfDictionary(nn.Linear):
    def forward(self, state: Any) -> Any:
        hidden = torch.tanh(super().forward(state["hidden"])) * state["scale"]
        total, count = state["sums"]
        return state | {"hidden": hidden, "sums": (total + hidden, count + 1)}


class WholeTuple(Whole):
    """Hands a tuple on, in two passes or one."""

    passes = 1

    def block(self, i: int) -> nn.Module:
        return OfTuple(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.before(x), x
        for _ in range(self.passes):
            for block in self.blocks:
                state = block(state)
        return self.head(state[0]) + state[1]


class OfTuple(nn.Linear):
    def forward(self, state: Any) -> Any:
        hidden, other = state
        return torch.tanh(super().forward(hidden)) + other, other * 0.9


class WholeTwice(WholeTuple):
    passes = 2


class WholeInPlace(Whole):
    """Has blocks that put what they compute into the dictionary."""

    def block(self, i: int) -> nn.Module:
        return IntoDictionary(WIDTH, WIDTH)


class IntoDictionary(nn.Linear):
    def forward(self, state: Any) -> Any:
        total, count = state["sums"]
        state["hidden"] = torch.tanh(super().forward(state["hidden"])) * state["scale"]
        state["sums"] = total + state["hidden"], count + 1
        return state


class WholeRead(Whole):
    """Uses the dictionary between two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        state: Any = {"hidden": self.before(x), "scale": 1 + x[:, :1], "sums": (x, 0)}
        for block in self.blocks:
            state = block(state)
            state["hidden"] = self.norm(state["hidden"])
        return self.head(state["hidden"])


class WholeSkipped(Whole):
    """Leaves a block out."""

    def forward(self, x: Tensor) -> Tensor:
        state: Any = {"hidden": self.before(x), "scale": 1 + x[:, :1], "sums": (x, 0)}
        for i, block in enumerate(self.blocks):
            state = block(state) if i != 1 else state
        return self.head(state["hidden"])


class WholeOnlyLater(Whole):
    """Begins with a dictionary, and gives the second block something else."""

    def forward(self, x: Tensor) -> Tensor:
        state: Any = {"hidden": self.before(x), "scale": 1 + x[:, :1], "sums": (x, 0)}
        for block in self.blocks:
            block(state)
        return self.head(state["hidden"])


class ByKeys(Loop):
    """Loops over an nn.ModuleDict's keys, values and items."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleDict({f"block {i}": self.block(i) for i in range(self.count)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        ways: list[Any] = [
            [self.blocks[name] for name in self.blocks],
            self.blocks.values(),
            (block for _, block in self.blocks.items()),
        ]
        for i, block in enumerate(ways[self.global_step % 3]):
            hidden = self.one(i, block, hidden)
        assert list(self.blocks) == list(self.blocks.keys()) == list(dict(self.blocks.items()))
        assert len(self.blocks) == self.count
        assert "block 1" in self.blocks
        return self.head(hidden)


class ByKeysDrops(ByKeys):
    """Skips the last one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        if self.global_step % 2:
            for name in self.blocks:
                hidden = hidden if name == "block 4" else self.blocks[name](hidden).tanh()
        else:
            for name, block in self.blocks.items():
                hidden = hidden if name == "block 4" else block(hidden).tanh()
        return self.head(hidden)


class DropsNothing(Loop):
    """Changes in place what dropout has handed through."""

    def one(self, i: int, block: Any, hidden: Tensor) -> Tensor:
        made = block(hidden)
        dropped = F.dropout(made, 0.0)
        dropped += 1.0
        return made + dropped


class TwoPasses(Loop):
    """Hands hidden states of one pass to blocks of the next one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.before(x), []
        for block in self.blocks:
            kept.append(hidden)
            hidden = block(hidden)
        for block, before in zip(self.blocks, kept, strict=True):
            hidden = block(hidden) + before
        return self.head(hidden)


class Probes(Loop):
    """Uses what the first block returned in another pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        probe = self.blocks[0](hidden * 2)
        for block in self.blocks:
            hidden = block(hidden) + probe
        return self.head(hidden)


class LastOnly(Loop):
    """Uses behind the loop what the loop doesn't tell of."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for i, block in enumerate(self.blocks):
            given = hidden if i == self.count - 1 else None
            hidden = block(hidden)
        return self.head(hidden + given)


class Previous(Loop):
    """Uses behind the loop what no pass of it uses."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            previous = hidden
            hidden = block(hidden)
        return self.head(hidden + previous)


WORK = (
    *(Loop, Two, Activations, PreNorm, Norms, Gates, InPlace, First, Collected, Jumping),
    *(
        Widths,
        Images,
        Masks,
        Sequence,
        Concatenated,
        Remembers,
        Parts,
        TwoParts,
        FirstWithout,
        NamedParts,
        NestedParts,
        CollectedParts,
        SharedNorms,
        Asks,
        AsksSequence,
        ReadsLate,
        Picks,
    ),
    *(Flow, FlowFromZeros, Backcasts, Skips, Maps, NoMaps, InTraining, Shapes, Tokens, Halves),
    *(TwoKept, Biases, Mixture, Structures, Dictionaries, OwnLoop, OwnList, KeepsStates, Looking),
    *(CollectedForNothing, ByForward, WrapsForwards, OutIndices, OutOfThree),
    *(LastOnly, ByKeys, ByKeysDrops, Whole, WholeTuple, WholeInPlace),
    *(Drops, DropsWhole, DropsMost, DropsIndexed, DropsBehind, DropsByChance),
    *(Children, NamedChildren, Slices),
)
OF_STEPS_BEFORE = Remembers, KeepsStates  # which with micro-batches is another one's
#: What comes out of the loop is built in different ways.
BUILT_OTHERWISE = Drops, DropsMost, DropsIndexed, DropsBehind, DropsByChance


def trained(kinds: Any, stages: int, step: Any) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        torch.manual_seed(2)
        strategy = GPipeStrategy(3, balance="params", step=step)
        found[kind.__name__] = train(kind(), max_steps=4, devices=stages, strategy=strategy)
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    found = {}
    for kind in WORK:
        torch.manual_seed(2)
        found[kind.__name__] = train(kind(), max_steps=4)
    return found


@pytest.mark.parametrize(
    ("stages", "step"),
    [(1, "micro-batch"), (2, "mini-batch"), (2, "micro-batch"), (4, "mini-batch")],
)
def test_a_loop_may_do_what_works_sample_by_sample(stages: int, step: str, plain: Any) -> None:
    kinds = [kind for kind in WORK if kind.count >= stages]
    if step == "micro-batch":
        kinds = [kind for kind in kinds if kind not in (*OF_STEPS_BEFORE, *BUILT_OTHERWISE)]
    for found in run_ranks(trained, stages, kinds, stages, step)[:1]:
        for name, state in found.items():
            torch.testing.assert_close(
                state, plain[name], atol=1e-10, rtol=0, msg=f"{name}: {{}}".format
            )


def test_a_run_on_zeros_leaves_no_trace() -> None:
    module = Counting("sgd")
    train(module, max_steps=3, strategy=GPipeStrategy(1, step="micro-batch"))
    for block in module.blocks:
        assert block.calls == 3
        assert len(block.seen) == 3
        assert all(block.seen)


def test_blocks_may_be_asked_for_more_in_some_steps() -> None:
    torch.manual_seed(2)
    expected = train(Flags(), max_steps=4, devices=1)
    for stages in (1, 2):
        found = run_ranks(trained, stages, (Flags,), stages, "mini-batch")[0]["Flags"]
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OverSamples, "'mean' uses the hidden state between two blocks"),
        (OverAll, "'mean' uses the hidden state between two blocks"),
        (BatchNorm, "'(batch_norm|numel)' uses the hidden state between two blocks"),
        (Aligned, "'add' uses the hidden state between two blocks"),
        (Decides, "'any' uses the hidden state between two blocks"),
        (Writes, "'add_' uses the hidden state .* Write x = x \\+ y for x \\+= y"),
        (OtherMode, "'mul' uses the hidden state between two blocks"),
        (Shared, "changes in place what block 1 has returned, which shares memory"),
        (ChangesInput, "A tensor that a block was called with was changed in place"),
        (LastWithout, "The loop calls 'linear' of block 4 otherwise than the parts of the block"),
        (OtherParts, "The loop calls '1' of block 4 otherwise than the parts of the block before"),
        (FewerParts, "'mse_loss' uses the hidden state between two blocks"),
        (DropsNothing, "'add_' uses the hidden state between two blocks"),
        (Probes, "uses a hidden state of a block that isn't the last one"),
        (NumberFirst, "Block 0 returns a tensor without dimensions first: let it return the"),
        (ByValues, r"Block 0 returned TreeSpec\(tuple, .*, not a tensor as without data"),
        (Roots, "'sqrt' uses the hidden state between two blocks"),
        (MayShare, r"'add_' uses the hidden state .* Write x = x \+ y for x \+= y"),
        (AfterIdentity, r"'add_' uses the hidden state .* Write x = x \+ y for x \+= y"),
        (Changing, r"Block 0 returned something of shape \[\d, 6\], not None, as it was expected"),
        (
            Refuses,
            r"RefusesZeros can't run on the meta device.* taken for one tensor.* 'unbind' uses",
        ),
        (KeepsLast, "A second backward through the same call|a backward through the backbone"),
        (WholeRead, "The loop hands no tensor from block to block, but a tuple or a dictionary"),
        (WholeOnlyLater, "The loop hands no tensor from block to block, but a tuple or a dict"),
        (WholeSkipped, "layer 2 of the backbone by itself, or out of order, where layer 1 would"),
        (Previous, "'add' uses a hidden state of a block that isn't the last one, behind the loop"),
    ],
)
@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_what_could_not_be_right_is_refused(kind: Any, message: str, step: Any) -> None:
    with pytest.raises(RuntimeError, match=message):
        trained([kind], 1, step)


@pytest.mark.parametrize("stages", [1, 2])
def test_numbers_of_a_micro_batch_are_those_of_its_step(stages: int) -> None:
    """And the mini-batch's, whose losses are means."""
    torch.manual_seed(2)
    expected = train(Scalars(), max_steps=4)
    found = run_ranks(trained, stages, [Scalars], stages, "micro-batch")[0]["Scalars"]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Scalars, "has no batch dimension and differs between micro-batches"),
        (Turned, r"Block 0 returned something of shape \[6, 2\], not \[2, 6\] as it was expected"),
        (Lists, "What a block returns beside its hidden state was used"),
    ],
)
def test_what_is_not_of_samples_is_refused(kind: Any, message: str) -> None:
    """In a mini-batch's step."""
    with pytest.raises((RuntimeError, ValueError), match=message):
        trained([kind], 1, "mini-batch")


@pytest.mark.parametrize("stages", [1, 2])
def test_another_pass_may_use_what_has_come_out(stages: int) -> None:
    kinds: list[Any] = [TwoPasses, WholeTwice]
    found = run_ranks(trained, stages, kinds, stages, "mini-batch")[0]
    for kind in kinds:
        torch.manual_seed(2)
        expected = train(kind(), max_steps=4)
        torch.testing.assert_close(found[kind.__name__], expected, atol=1e-10, rtol=0)


def test_it_is_refused_on_several_stages() -> None:
    with pytest.raises(RankError, match="'mean' uses the hidden state between two blocks"):
        run_ranks(trained, 2, [OverSamples], 2, "mini-batch")
    with pytest.raises(RankError, match="loops backwards over the backbone's layers"):
        run_ranks(validated, 2, Samples, 2)


def validated(kind: Any, stages: int) -> Any:
    torch.manual_seed(2)
    strategy = GPipeStrategy(2) if stages else "auto"
    options = {"val_check_interval": 2, "limit_val_batches": 1, "max_steps": 2}
    run = trainer(devices=stages or 1, strategy=strategy, **options)
    run.fit(kind("sgd"))
    return run.callback_metrics["sampled"]


def test_what_loops_over_itself_is_of_its_class_again() -> None:
    module = OwnLoop()
    during = []

    def look(*_: Any) -> None:
        copied = copy.deepcopy(module.blocks)
        during.append((type(module.blocks), type(copied), type(copied[0])))

    module.on_train_batch_end = look  # type: ignore[method-assign]
    train(module, max_steps=1, strategy=GPipeStrategy(2))
    ((taken, copied, layer),) = during
    assert issubclass(taken, Flows)
    assert taken is not Flows
    assert (copied, layer, type(module.blocks)) == (Flows, Coupling, Flows)
    assert type(pickle.loads(pickle.dumps(module.blocks))) is Flows


def test_a_dictionary_is_one_again() -> None:
    module = ByKeys()
    during = []

    def look(*_: Any) -> None:
        during.append((copy.deepcopy(module.blocks), str(module.blocks)))

    module.on_train_batch_end = look  # type: ignore[method-assign]
    train(module, max_steps=1, strategy=GPipeStrategy(2))
    ((copied, printed),) = during
    assert type(copied) is type(module.blocks) is nn.ModuleDict
    assert vars(copied).keys() == vars(module.blocks).keys()
    assert type(copied["block 1"]) is nn.Linear
    assert printed == str(module.blocks)


def test_a_loop_may_go_backwards_on_one_stage() -> None:
    torch.testing.assert_close(validated(Samples, 1), validated(Samples, 0))


def test_other_objects_that_blocks_return_are_told_of() -> None:
    with pytest.raises(AttributeError, match=r"no attribute .logits.: it is a tensor\. Blocks may"):
        trained([Objects], 1, "mini-batch")


SHAPE = 4, 3, 6
#: Of hidden states for functions that need another one.
SHAPES: dict[str, tuple[int, ...]] = {"2d": (4, 4, 5, 6), "3d": (4, 3, 4, 4, 5)}

#: Arguments of functions that need more than a hidden state; ``...`` stands for one.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("addcdiv", "addcmul", "scaled_dot_product_attention"), (..., ..., ...)),
    **dict.fromkeys(("clamp", "clip"), (..., -0.5, 0.5)),
    **dict.fromkeys(("clamp_max", "clamp_min", "full_like"), (..., 0.1)),
    **dict.fromkeys(("alpha_dropout", "dropout"), (..., 0.5, False)),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), (..., 0.5, False)),
    **dict.fromkeys(("softmax", "log_softmax", "mean", "sum", "unsqueeze", "amax"), (..., -1)),
    **dict.fromkeys(("all", "amin", "any", "argmax", "argmin", "cumprod", "softmin"), (..., -1)),
    **dict.fromkeys(("cumsum", "logsumexp", "prod", "std", "var", "flip", "squeeze"), (..., 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (..., SHAPE[1:])),
    **dict.fromkeys(("norm", "repeat_interleave"), (..., 2, 1)),
    **dict.fromkeys(("movedim", "moveaxis", "swapaxes", "swapdims", "transpose"), (..., 1, 2)),
    **dict.fromkeys(("reshape", "view"), (..., 4, -1)),
    **{f"{kind}avg_pool{n}d": (..., 2) for n in (1, 2, 3) for kind in ("", "adaptive_")},
    **{f"{kind}max_pool{n}d": (..., 2) for n in (1, 2, 3) for kind in ("", "adaptive_")},
    **{f"conv{n}d": (..., torch.ones(2, (3, 4, 3)[n - 1], *[2] * n).double()) for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": (..., torch.ones((3, 4, 3)[n - 1], 2, *[2] * n).double())
        for n in (1, 2, 3)
    },
    "__getitem__": (..., (slice(None), None, 1, slice(1, None))),
    "cat": ((..., ...), 1),
    "einsum": ("bij,bkj->bik", ..., ...),
    "expand": (..., -1, 3, 6),
    "flatten": (..., 1),
    "group_norm": (..., 3),
    "interpolate": (..., 9),
    "lerp": (..., ..., 0.3),
    "linear": (..., torch.ones(2, 6).double()),
    "masked_fill": (..., torch.arange(72).reshape(SHAPE) > 30, 0.0),
    "matmul": (..., torch.ones(6, 2).double()),
    "narrow": (..., 2, 1, 3),
    "pad": (..., (1, 2)),
    "permute": (..., (0, 2, 1)),
    "pixel_shuffle": (..., 2),
    "pixel_unshuffle": (..., 2),
    "prelu": (..., torch.ones(3).double()),
    "repeat": (..., 1, 2, 1),
    "roll": (..., 1, 2),
    "select": (..., 1, 2),
    "stack": ((..., ...), 2),
    "torch.flip": (..., (1,)),
    "torch.reshape": (..., (4, -1)),
    "Tensor.where": (..., torch.arange(72).reshape(SHAPE) > 30, ...),
    "threshold": (..., 0.1, 0.0),
    "to": (..., torch.float32),
    "unflatten": (..., 2, (2, 3)),
    "where": (torch.arange(72).reshape(SHAPE) > 30, ..., ...),
}
_BINARY = {
    *("add", "atan2", "bmm", "cosine_similarity", "div", "divide", "eq", "floor_divide", "fmod"),
    *("ge", "gt", "le", "logaddexp", "logical_and", "logical_or", "logical_xor", "lt", "maximum"),
    *("minimum", "mul", "multiply", "ne", "pow", "remainder", "reshape_as", "rsub", "sub"),
    *("subtract", "true_divide", "type_as", "view_as"),
    *("__and__", "__floordiv__", "__or__", "__rdiv__", "__rfloordiv__", "__rpow__", "__rsub__"),
    *("__rtruediv__", "__xor__"),
}
_OF_BITS = {"__and__", "__invert__", "__or__", "__xor__", "bitwise_not"}
_RANDOM = {"rand_like", "randn_like"}


def given_to(name: str) -> tuple[Any, ...]:
    last = name.rpartition(".")[2]
    by_default = (..., ...) if last in _BINARY else (...,)
    return ARGUMENTS.get(name) or ARGUMENTS.get(last, by_default)


def filled(given: Any, hidden: Any) -> Any:
    """Arguments with hidden states in their places."""
    tensors = iter(hidden)

    def one(argument: Any) -> Any:
        return next(tensors) if argument is ... else argument

    return [tuple(map(one, a)) if isinstance(a, tuple) else one(a) for a in given]


@pytest.mark.parametrize("function", between._NAMED.values(), ids=lambda function: function.name)
def test_a_function_gives_of_a_sample_what_it_gives_of_a_batch(function: Any) -> None:
    """Each that may stand between two blocks."""
    torch.manual_seed(0)
    name = function.name.rpartition(".")[2]
    square = (4, 3, 3) if name == "bmm" else SHAPE
    shape = SHAPES["2d"] if name.startswith("pixel") else SHAPES.get(name[-2:], square)
    if name == "pixel_unshuffle":
        shape = 4, 4, 6, 6
    hidden = [torch.rand(shape, dtype=torch.double) for _ in range(3)]
    if name in _OF_BITS:
        hidden = [(10 * t).long() for t in hidden]
    given = given_to(function.name)

    def of(samples: slice) -> Any:
        """What it is given of some samples."""
        of_each = (
            a[samples] if isinstance(a, Tensor) and a.shape == shape else a
            for a in filled(given, [t[samples] for t in hidden])
        )
        return list(of_each)

    assert function.whole(filled(given, [Look(len(shape))] * 3), {}) is not None
    made, parts = function.run(*of(slice(None))), []
    for i in range(len(made)):
        args = of(slice(i, i + 1))
        if function.of_samples:
            parts.append(between.run_function(function.of_samples, (args[0], made.shape[1:]), {}))
        else:
            parts.append(function.run(*args))
    if name in _RANDOM:
        assert made.shape == shape
    else:
        torch.testing.assert_close(torch.cat(parts), made, atol=0, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Tensor.mean", (...,)),
        ("Tensor.mean", (..., 0)),
        ("Tensor.sum", (..., (0, 1))),
        ("Tensor.sum", (..., -3)),
        ("torch.softmax", (..., 0)),
        ("torch.cat", ((..., ...),)),
        ("torch.cat", ((..., ...), -3)),
        ("torch.stack", ((..., ...), 0)),
        ("torch.stack", ((..., ...), -4)),
        ("Tensor.transpose", (..., 0, 1)),
        ("Tensor.transpose", (..., 2, -3)),
        ("Tensor.permute", (..., 1, 0, 2)),
        ("Tensor.flatten", (...,)),
        ("Tensor.unsqueeze", (..., 0)),
        ("Tensor.unsqueeze", (..., -4)),
        ("functional.normalize", (..., 2.0, 0)),
        ("functional.glu", (..., 0)),
        ("functional.layer_norm", (..., SHAPE)),
        ("functional.linear", (torch.ones(2, 6), ...)),
        ("Tensor.matmul", (..., torch.ones(SHAPE[0], 6, 6))),
        ("Tensor.add", (..., torch.ones(2, *SHAPE))),
        ("Tensor.__getitem__", (..., 0)),
        ("Tensor.__getitem__", (..., slice(1, None))),
        ("Tensor.__getitem__", (..., None)),
        ("Tensor.__getitem__", (..., (None, slice(None)))),
        ("Tensor.__getitem__", (..., (slice(None, None, 2), 1))),
        ("Tensor.__getitem__", (..., (slice(None), torch.ones(3).long(), 1))),
        ("Tensor.__getitem__", (..., (slice(None), torch.ones(3, 6).bool()))),
        ("Tensor.__getitem__", (..., (slice(None), True))),
        ("Tensor.__getitem__", (..., (Ellipsis, 1, 1, 1))),
        ("Tensor.argmax", (...,)),
        ("Tensor.cumsum", (..., 0)),
        ("Tensor.std", (..., True)),
        ("Tensor.norm", (...,)),
        ("Tensor.flip", (..., 1, 0)),
        ("Tensor.roll", (..., 1)),
        ("Tensor.roll", (..., 1, 0)),
        ("Tensor.squeeze", (...,)),
        ("Tensor.repeat", (..., 2, 1, 1)),
        ("Tensor.repeat", (..., 1, 1, 1, 1)),
        ("Tensor.repeat_interleave", (..., 2)),
        ("Tensor.repeat_interleave", (..., 2, 0)),
        ("Tensor.expand", (..., 2, -1, -1, -1)),
        ("Tensor.view", (..., torch.int32)),
        ("Tensor.movedim", (..., 0, 1)),
        ("Tensor.swapaxes", (..., -3, 1)),
        ("Tensor.to", (..., torch.device("cpu"))),
        ("Tensor.to", (..., "cpu")),
        ("torch.cosine_similarity", (..., ..., 0)),
        ("torch.cosine_similarity", (..., torch.ones(SHAPE))),
        ("torch.einsum", ("bij,bij->ij", ..., ...)),
        ("torch.einsum", ("bij,bkj->ibk", ..., ...)),
        ("torch.einsum", ("bij,ajk->bik", ..., ...)),
        ("torch.einsum", ("bij,bjk->bik", ..., torch.ones(SHAPE))),
        ("torch.einsum", ("bii->", ...)),
        ("functional.pad", (..., (0, 0, 0, 0, 1, 0))),
        ("functional.max_pool2d", (..., 2)),  # [channels, height, width]
        ("functional.conv2d", (..., torch.ones(2, 4, 3, 3))),
        ("functional.dropout2d", (...,)),
        ("functional.instance_norm", (..., torch.ones(3), torch.ones(3))),
        (
            "functional.scaled_dot_product_attention",
            (..., ..., ..., torch.ones(SHAPE[0], 3, 3)),
        ),
    ],
)
def test_what_mixes_samples_is_known(name: str, arguments: Any) -> None:
    def one(argument: Any) -> Any:
        return Look(len(SHAPE)) if argument is ... else argument

    keeps = name.endswith("__getitem__")  # an index may have an ellipsis
    given = [
        tuple(map(one, a)) if isinstance(a, tuple) and not keeps else one(a) for a in arguments
    ]
    assert between._NAMED[name].whole(given, {}) is None


@pytest.mark.parametrize("name", ["bmm", "matmul"])
def test_a_product_of_two_hidden_states_may_have_a_matrix_for_each_sample(name: str) -> None:
    function = between._NAMED[f"torch.{name}"]
    assert function.whole([Look(3), Look(3)], {}) == set()
    assert function.whole([Look(2), Look(2)], {}) is None


def test_an_index_may_take_parts_of_a_sample() -> None:
    index = between._NAMED["Tensor.__getitem__"].whole
    numbers = torch.tensor([0, 2])
    assert index([Look(3), (Ellipsis, 0)], {}) == set()
    assert index([Look(3), (Ellipsis, None)], {}) == set()
    assert index([Look(3), (slice(None), numbers)], {}) == {id(numbers)}
    assert index([Look(3), (slice(None), [0, -1])], {}) == set()
    for wrong in ([0, 1], [[0]]), ([0], slice(None)), (slice(None), [True]), (slice(None), [0], 0):
        assert index([Look(3), tuple(wrong)], {}) is None


def test_a_hidden_state_that_is_given_by_name_is_refused() -> None:
    given = {"input": Look(3), "dim": 1}
    assert between._NAMED["torch.softmax"].whole((), given) is None
    assert between._NAMED["torch.transpose"].whole((), {**given, "dim0": 1, "dim1": 2}) is None


@pytest.mark.parametrize("stages", [1, 2])
def test_micro_batches_may_not_skip_blocks_whose_residuals_the_loop_adds(stages: int) -> None:
    """Each stage finds it out by itself, and the first to do so is heard."""
    message = r"(loop skips blocks|is built otherwise than before).* hidden = block\(hidden\)"
    with pytest.raises(RankError, match=message):
        run_ranks(trained, stages, (Drops,), stages, "micro-batch")


def partitioned(kinds: Any, stages: int) -> list[Any]:
    found = []
    for kind in kinds:
        strategy = GPipeStrategy(3)
        train(kind(), max_steps=1, devices=stages, strategy=strategy)
        found.append(strategy.partition.sizes)
    return found


class DropsFirstSteps(DropsWhole):
    """Skips what follows the second block in the first step."""

    count = 6

    def is_dropped(self, i: int) -> bool:
        return i > 1


class Six(DropsFirstSteps):
    def is_dropped(self, i: int) -> bool:
        return False


def test_layers_are_shared_out_as_if_none_were_skipped() -> None:
    one, other = run_ranks(partitioned, 2, (DropsFirstSteps, Six), 2)[0]
    assert one == other == (3, 3)
