"""Every precision, with clipping, and weights that don't depend on the number of stages."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import DEVICE, trainer

FIRST_SCALE = 2.0**20 if DEVICE == "cpu" else 2.0**28
PRECISIONS = ("64-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())]
        self.backbone = nn.Sequential(*layers, nn.Linear(6, 6, bias=False))
        self.head = nn.Linear(6, 3)
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.to(self.backbone[0].weight.dtype)
        loss = nn.functional.cross_entropy(self.head(self.backbone(x)), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def train_dataloader(self) -> Any:
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x, x.abs().argmax(1) % 3), batch_size=8)


def options_of(precision: str) -> dict[str, Any]:
    if precision != "16-mixed":
        return {"precision": precision}
    # on a CPU Lightning takes bf16 for it, but its plugin works; the scale overflows at first
    scaler = torch.amp.GradScaler(DEVICE, init_scale=FIRST_SCALE, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", DEVICE, scaler)]}


def run(precision: str, chunks: int, stages: int, clip: dict[str, Any]) -> Any:
    """Train; with no chunks, a plain Trainer."""
    torch.manual_seed(1)
    module = Net()
    world = torch.distributed.get_world_size()
    strategy = GPipeStrategy(chunks, stages=stages) if chunks else "auto"
    options = {**options_of(precision), **clip}
    if not chunks:
        trainer(devices=1, max_epochs=3, **options).fit(module)
        return module.state_dict(), module.scales
    trainer(devices=world, max_epochs=3, strategy=strategy, **options).fit(module)
    return module.state_dict(), module.scales


CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_do_not_depend_on_the_number_of_stages(precision: str, clip: str) -> None:
    expected, scales = run_ranks(run, 1, precision, 3, 1, CLIPS[clip])[0]
    ranks = run_ranks(run, 3, precision, 3, 3, CLIPS[clip])  # a first, a middle and a last stage
    for name, tensor in ranks[0][0].items():
        assert torch.equal(tensor, expected[name]), name
    assert all(rank[1] == scales for rank in ranks), "all stages scale alike"
    if precision == "16-mixed":
        assert scales[-1] < FIRST_SCALE, "it did overflow"
        assert max(scales) > min(scales), "and some steps were made"
        replicas = run_ranks(run, 4, precision, 3, 2, CLIPS[clip])
        assert all(rank[1] == replicas[0][1] for rank in replicas), "and so do all replicas"


@pytest.mark.parametrize("clip", ["none", "norm"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_close_to_a_plain_trainer(precision: str, clip: str) -> None:
    expected, scales = run_ranks(run, 1, precision, 0, 1, CLIPS[clip])[0]
    state, own_scales = run_ranks(run, 2, precision, 1, 2, CLIPS[clip])[0]
    tolerance = {"64-true": 1e-12, "32-true": 1e-6}.get(precision, 0.02)
    torch.testing.assert_close(state, expected, rtol=0, atol=tolerance)
    assert own_scales == scales


class Asks(Net):
    """Goes by the type of what stands behind the backbone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        made = self.head(self.backbone(batch[0]))
        loss = nn.functional.cross_entropy(made, batch[1])
        assert (made.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        self.log("eps", torch.finfo(made.dtype).eps)
        return loss


def precise(stages: int) -> dict[str, Tensor]:
    strategy = GPipeStrategy(2, step="micro-batch")
    run = trainer(max_epochs=1, devices=stages, precision="bf16-mixed", strategy=strategy)
    run.fit(Asks())
    return dict(run.callback_metrics)


@pytest.mark.parametrize("stages", [1, 2])
def test_every_stage_knows_the_types_of_autocast(stages: int) -> None:
    for metrics in run_ranks(precise, stages, stages):
        assert metrics["eps"] == torch.finfo(torch.bfloat16).eps
