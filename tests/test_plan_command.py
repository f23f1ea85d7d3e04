"""``lightning-gpipe plan``, on configuration files and on functions that make a module."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import cli
from tests import expected_memory

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning uses what jsonargparse deprecates
SHORT = ["--chunks", "4", "--checkpoint", "always"]
DIGITS = ["--model", "digits:DigitsModel", "--data", "digits:DigitsData"]


def made() -> tuple[L.LightningModule, Any]:
    module = expected_memory.Transformer()
    return module, next(iter(module.train_dataloader()))


def nothing() -> int:
    return 3


def test_the_command_prints_plans(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "2", "--chunks", "4,8", "--checkpoint", "always,2"]
    cli.main(["plan", f"{__name__}:made", *options, "--memory", "16GB"])
    said = capsys.readouterr().out
    assert "Stages | Replicas | Virtual" in said
    assert "layouts fit in 16.0 GB a device" in said
    assert "8 layers of 'backbone' on" in said
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", f"{__name__}:made", *SHORT, "--devices", "2", "--memory", "10kB"])
    assert ended.value.code == 1


def test_a_reader_that_has_enough_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", f"{__name__}:made", "--devices", "2", *SHORT])
        assert ended.value.code == 141


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("made", "neither a configuration file"),
        ("tests.nowhere:made", "can't be imported"),
        (f"{__name__}:unmade", "can't be imported"),
        (f"{__name__}:nothing", "returned a int"),
    ],
)
def test_the_command_says_what_is_wrong(factory: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", factory, "--devices", "2"])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example's configuration file; its classes can be imported."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return str(EXAMPLES / "gpipe.yaml")


def row_of_stage(said: str, stage: int) -> list[str]:
    found = re.search(rf"^{stage} +\| .*$", said.split("layers of")[-1], re.MULTILINE)
    assert found is not None
    return [cell.strip() for cell in found[0].split("|")]


def test_a_configuration_file_is_planned(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", example, *DIGITS, "--stages", "2", "--checkpoint", "never"])
    screen = capsys.readouterr()
    assert "16 layers of 'backbone' on 2 stages, 8 micro-batches of 8 samples" in screen.out
    row = row_of_stage(screen.out, 0)
    assert row[5].endswith("kB")  # AdamW's states: its scheduler asks for the trainer's epochs
    assert screen.err == ""


class Warming(L.LightningModule):
    """Its optimizer's schedule asks for the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.backbone(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4)


def test_a_schedule_may_ask_for_the_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "warming.yaml"
    file.write_text(f"trainer: {{devices: 2, strategy: gpipe}}\nmodel: {__name__}.Warming\n")
    cli.main(["plan", str(file), "--stages", "2", "--chunks", "2", "--checkpoint", "never"])
    row = row_of_stage(capsys.readouterr().out, 0)
    assert row[3] == row[5] == "288 B"  # of weights, and of momentum


def test_numbers_that_are_none_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", f"{__name__}:made", "--devices", "2", "--chunks", "8,x"])
    assert "whole numbers, such as 4,8, got '8,x'" in capsys.readouterr().err


def test_arguments_of_fit_go_with_the_file(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [example, *DIGITS, "--devices", "2", "--stages", "2", "--checkpoint", "never"]
    held = []
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        given = ["--trainer.strategy.init_args.chunks=16", "--step", "micro-batch"]
        cli.main(["plan", *options, f"--trainer.precision={precision}", *given])
        said = capsys.readouterr().out
        assert "16 micro-batches of 4 samples, checkpoint=never, step=micro-batch" in said
        held.append(row_of_stage(said, 1))
    assert held[0][3] == held[1][3]
    assert len({row[3] for row in held}) == 2  # weights of half the size
    assert len({row[7] for row in held}) == 3  # and activations


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The class of the model and .* named once: in the file, or by --model"),
        ([*DIGITS, "--trainer.speed=9"], "speed"),
        ([*DIGITS, "--devices=0"], "devices must be a whole number from 1"),
        ([*DIGITS, "--trainer.devices=auto"], "give --devices"),
        ([*DIGITS, "--no-data"], "no example_input_array"),
        ([*DIGITS, "--trainer.strategy=ddp"], "strategy is DDPStrategy, and pipelines"),
        ([*DIGITS, "--data.batch_size=-1"], "The data can't be loaded"),
    ],
)
def test_what_a_file_lacks_is_told(example: str, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", example, *arguments])


def test_a_class_that_is_named_twice_is_told(tmp_path: Path) -> None:
    file = tmp_path / "warming.yaml"
    file.write_text(f"trainer: {{devices: 2, strategy: gpipe}}\nmodel: {__name__}.Warming\n")
    with pytest.raises(SystemExit, match="named once: in the file, or by --model"):
        cli.main(["plan", str(file), "--model", f"{__name__}:Warming"])


def test_what_goes_with_a_file_alone_is_told() -> None:
    for given, go in ((["--trainer.devices=2"], "goes"), (["--no-data"], "these go")):
        with pytest.raises(SystemExit, match=f"{go} with a configuration file alone"):
            cli.main(["plan", f"{__name__}:made", "--devices", "2", *given])
    with pytest.raises(SystemExit, match="--memroy 16GB: is no option of plan"):
        cli.main(["plan", f"{__name__}:made", "--devices", "2", "--memroy", "16GB"])
    with pytest.raises(SystemExit, match=r"memory must be None, a whole .*, got memory='16'"):
        cli.main(["plan", f"{__name__}:made", "--devices", "2", "--memory", "16"])
    with pytest.raises(SystemExit, match=r"There is no file nowhere\.yaml"):
        cli.main(["plan", "nowhere.yaml"])
