"""Blocks with extra arguments, in place of an ``nn.ModuleList``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import Blocks, GPipeStrategy
from lightning_gpipe.backbone import find_backbone
from lightning_gpipe.blocks import runner
from lightning_gpipe.cost import flop_costs
from tests import models
from tests.ranks import run_ranks
from tests.training import train


class Block(nn.Module):
    """Looks at a mask for each sample, at positions that all share, and at a second input."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)
        self.as_tuple = as_tuple

    def forward(
        self, hidden: Tensor, mask: Tensor, *, positions: Tensor, other: Tensor, flag: bool
    ) -> Any:
        if not flag:
            raise ValueError("flag is lost")
        mixed = self.linear(hidden) + positions * other
        hidden = hidden + torch.where(mask, mixed, 0.0).tanh()
        return (hidden, None) if self.as_tuple else hidden


class Encoder(models.Module):
    """Calls its blocks one after another, as models of Hugging Face do."""

    cut = True
    as_tuple = False

    def build(self) -> None:
        blocks = nn.ModuleList(Block(self.as_tuple) for _ in range(4))
        self.before = nn.Linear(models.WIDTH, models.WIDTH)
        self.blocks = Blocks(blocks) if self.cut else blocks
        self.head = nn.Sequential(nn.Linear(models.WIDTH, 4), nn.Linear(4, models.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = x, x > -1
        positions = torch.arange(models.WIDTH, dtype=x.dtype).unsqueeze(0)
        other = self.before(x)
        for block in self.blocks[:4]:
            output = block(hidden, mask, positions=positions, other=other, flag=True)
            hidden = output[0] if self.as_tuple else output
        return self.head(hidden)


class Tuples(Encoder):
    as_tuple = True


class Square(Encoder):
    """As many samples as positions."""

    samples = models.WIDTH


class Uncut(Encoder):
    cut = False


def pipelined(kind: str, stages: int, balance: Any) -> Any:
    torch.manual_seed(2)
    module = globals()[kind]()
    strategy = GPipeStrategy(3, balance=balance)
    return train(module, max_steps=5, devices=stages, strategy=strategy)


@pytest.mark.parametrize("balance", ["flops", "params"])
@pytest.mark.parametrize("kind", ["Encoder", "Tuples", "Square"])
def test_a_model_trains_as_before(kind: str, balance: str) -> None:
    torch.manual_seed(2)
    uncut = Uncut()
    uncut.as_tuple = kind == "Tuples"
    for block in uncut.blocks:
        block.as_tuple = uncut.as_tuple
    uncut.samples = globals()[kind].samples
    plain = train(uncut, max_steps=5)
    for stages in (1, 2, 3):
        found = run_ranks(pipelined, stages, kind, stages, balance)[0]
        assert list(found) == list(plain)
        torch.testing.assert_close(found, plain, atol=1e-10, rtol=0)


def test_blocks_stand_for_one() -> None:
    blocks = Blocks(nn.Linear(2, 2) for _ in range(3))
    assert len(blocks) == 1
    assert list(blocks) == [blocks]
    assert blocks[:3] == [blocks]
    assert blocks[0] is blocks
    assert [name for name, _ in blocks.named_children()] == ["0", "1", "2"]
    with pytest.raises(TypeError, match="first positional argument"):
        blocks(hidden=torch.zeros(1, 2))


def test_blocks_are_the_backbone() -> None:
    """Though other parts of the model could be cut, too."""
    assert find_backbone(Encoder(), None) == "blocks"
    module = Uncut()
    del module.head
    with pytest.raises(ValueError, match=r"self.blocks = lightning_gpipe.Blocks\(self.blocks\)"):
        find_backbone(module, None)


def test_costs_of_blocks() -> None:
    blocks = Blocks(Block(True) for _ in range(3)).double()
    x = torch.zeros(4, models.WIDTH, dtype=torch.float64)
    value = Blocks.pack(x, x > 0, positions=x[:1], other=x, flag=True)
    first, second, _ = flop_costs(list(blocks.children()), runner(blocks), value)
    assert first == second > 2 * 4 * models.WIDTH**2
