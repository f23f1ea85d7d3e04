"""Plans of what hooks make of a batch, as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy, cli

SAMPLES, WIDTH = 8, 16
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning uses what jsonargparse deprecates


class Plain(L.LightningModule):
    """Trains on pictures of floating-point numbers, as many values as the backbone is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.calls: list[Any] = []
        self.target = torch.device("cpu")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.backbone(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Repeats(Plain):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return (batch - self.mean).repeat(4, 1)


class Unpacks(Plain):
    """Gets a dict, and moves its tensors itself."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        assert batch["x"].device.type == "cpu"
        return [batch["x"]]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.target = device
        return [x.to(device) for x in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        (x,) = batch
        assert x.device == self.target
        return x.flatten(1).float() / 255


class Reads(Plain):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch / 255 if batch.max().item() > 1 else batch


class Writes(Plain):
    """Changes a tensor that only a list holds."""

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.calls[0].add_(1)
        return batch


def said(module: L.LightningModule, batch: Any, device: str = "cpu") -> str:
    strategy, options = GPipeStrategy(4, backbone="backbone"), {"devices": 2, "stages": [2]}
    return str(strategy.plan(module, batch, device=device, **options))


def test_the_step_gets_what_hooks_make_of_the_batch() -> None:
    x = torch.ones(SAMPLES, WIDTH)
    assert said(Repeats(), x) == said(Plain(), x.repeat(4, 1)) != said(Plain(), x)


def test_hooks_get_the_batch_on_the_devices_of_a_run() -> None:
    module = Unpacks()
    pictures = {"x": torch.ones(SAMPLES, 4, WIDTH // 4, dtype=torch.uint8, device="meta")}
    x = torch.ones(SAMPLES, WIDTH, device="meta")
    assert said(module, pictures, "cuda") == said(Plain(), x, "cuda")
    assert module.calls == []


@pytest.mark.parametrize(("version", "is_built"), [("2.9.1+cu128", True), ("2.14.0+cpu", False)])
def test_where_pytorch_would_end_the_process_a_plan_is_of_the_cpu(
    version: str, is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(SAMPLES, WIDTH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    match = "not of cuda's, .* Plan with torch 2.10 or newer, built for CUDA"
    with pytest.warns(UserWarning, match=match):
        assert said(Plain(), x, "cuda") == said(Plain(), x, "cpu")


def test_examples_go_through_no_hook() -> None:
    module, plain = Repeats(), Plain()
    for each in (module, plain):
        each.forward = each.backbone.forward
        each.example_input_array = torch.ones(SAMPLES, WIDTH)
    assert said(module, None) == said(plain, None)


def test_a_hook_that_fails_is_named() -> None:
    module = Reads()
    with pytest.raises(
        ValueError, match=r"^on_after_batch_transfer\(\) of Reads can't run without"
    ):
        said(module, torch.ones(SAMPLES, WIDTH))
    writer, kept = Writes(), torch.ones(1)
    writer.calls.append(kept)
    with pytest.raises(ValueError, match=r"^on_before_batch_transfer\(\) of Writes"):
        said(writer, torch.ones(SAMPLES, WIDTH))
    assert kept == 1


class Pictures(L.LightningDataModule):
    """Its hook goes before the module's, and asks the trainer as users' do."""

    def train_dataloader(self) -> Any:
        pictures = torch.ones(2 * SAMPLES, 4, WIDTH // 4, dtype=torch.uint8)
        return DataLoader(TensorDataset(pictures), SAMPLES)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Tensor:
        assert self.trainer is not None
        x: Tensor = batch[0].flatten(1).float() / 255
        return x.repeat(2, 1) if self.trainer.training else x


def test_hooks_of_a_data_module_go_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pictures.yaml"
    classes = f"model: {__name__}.Reads\ndata: {__name__}.Pictures\n"
    file.write_text(f"trainer: {{devices: 2, strategy: gpipe}}\n{classes}")
    cli.main(["plan", str(file), "--stages", "2", "--chunks", "4", "--checkpoint", "never"])
    assert f"4 micro-batches of {2 * SAMPLES // 4} samples" in capsys.readouterr().out
