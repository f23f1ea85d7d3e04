"""The same weights and buffers, bit for bit, whatever the number of stages."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import train


class ConvNet(L.LightningModule):
    """Dropout, batch norm, channels-last, in-place layers and a head outside, in float32."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width_in, width_out in ((3, 8), (8, 12), (12, 16)):
            layers += [
                nn.Conv2d(width_in, width_out, 3, padding=1),
                nn.BatchNorm2d(width_out),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.3),
            ]
        self.backbone = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)
        )
        self.stem = nn.BatchNorm2d(3)
        self.head = nn.Linear(16, 5)
        self.drop = nn.Dropout(0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x.contiguous(memory_format=torch.channels_last)) + 0.1 * torch.rand(
            (), device=x.device
        )
        return nn.functional.cross_entropy(
            self.head(self.drop(self.backbone(x))), y, weight=torch.rand(5, device=x.device)
        )

    def train_dataloader(self) -> Any:
        x, y = torch.randn(50, 3, 9, 9), torch.randint(5, (50,))
        return DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def weights(stages: int, mode: str) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    module = ConvNet().to(memory_format=torch.channels_last)
    strategy = GPipeStrategy(4, checkpoint=mode)  # type: ignore[arg-type]
    return train(
        module,
        max_epochs=3,
        devices=stages,
        strategy=strategy,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
    )


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_bits_do_not_depend_on_the_number_of_stages(mode: str) -> None:
    expected = run_ranks(weights, 1, 1, mode)[0]
    assert expected["backbone.1.num_batches_tracked"] == 15
    for stages in (2, 4):
        state = run_ranks(weights, stages, stages, mode)[0]
        different = [
            name for name, value in expected.items() if not torch.equal(value, state[name])
        ]
        assert not different, f"{stages} stages: {different}"
        assert [
            name for name, value in expected.items() if value.stride() != state[name].stride()
        ] == []


def test_seeds_matter() -> None:
    """The comparison above could fail: another seed gives other bits."""

    first = run_ranks(weights, 1, 1, "always")[0]
    second = run_ranks(unseeded_weights, 1)[0]
    assert not torch.equal(first["head.weight"], second["head.weight"])


def unseeded_weights() -> dict[str, Tensor]:
    L.seed_everything(4, verbose=False)
    return train(ConvNet(), max_epochs=1, devices=1, strategy=GPipeStrategy(4))
