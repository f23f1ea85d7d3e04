"""A backbone that is called inside torch.utils.checkpoint is refused, on one stage and on two."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import RankError, run_ranks
from tests.training import train


class Module(models.Around):
    """Calls its backbone as a user does who wants to save memory by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        if self.how == "sequential":
            hidden = checkpoint_sequential(self.backbone, 2, hidden, use_reentrant=False)
        elif self.how == "loop":
            for layer in self.backbone:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        else:
            hidden = checkpoint(self.backbone, hidden, use_reentrant=self.how == "reentrant")
        out: Tensor = self.after(hidden)
        return out


def fit(stages: int, how: str, step: str) -> None:
    strategy = GPipeStrategy(chunks=2, step=step)  # type: ignore[arg-type]
    train(Module(how), max_steps=2, devices=stages, strategy=strategy)


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
@pytest.mark.parametrize("how", ["whole", "reentrant", "loop", "sequential"])
def test_a_checkpointed_backbone_is_refused(how: str, step: str) -> None:
    with pytest.raises(RankError, match=r"inside torch\.utils\.checkpoint, .* Call it without"):
        run_ranks(fit, 2, 2, how, step)


@pytest.mark.parametrize("how", ["whole", "reentrant", "loop"])
def test_it_is_refused_on_one_stage(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"inside torch\.utils\.checkpoint, .* Call it without"):
        fit(1, how, "mini-batch")
