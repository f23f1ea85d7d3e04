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
HERE = r"at .*test_plan_command\.py:\d+"
DIGITS = ["--model", "digits:DigitsModel", "--data", "digits:DigitsData"]


def made() -> tuple[L.LightningModule, Any]:
    module = expected_memory.Transformer()
    return module, next(iter(module.train_dataloader()))


def nothing() -> int:
    return 3


def failing() -> Any:
    return {}["width"]


def of_no_data() -> Any:
    return Warming(), next(iter(DataLoader(TensorDataset(torch.ones(0, 8)))))


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


def too_narrow(*layers: nn.Module) -> tuple[L.LightningModule, Any]:
    module = Warming()
    module.backbone = nn.Sequential(nn.Linear(8, 8), *(layers or [nn.Linear(3, 8)]))
    return module, [torch.ones(4, 8)]


def too_narrow_inside() -> tuple[L.LightningModule, Any]:
    return too_narrow(Narrow())


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
        (f"{__name__}:SHORT", "is of type list: name a function"),
        ("./nowhere.py:made", "names a file: name the module as `import` does"),
        (f"{__name__}:failing", rf"raised an error: KeyError: 'width', {HERE} \(failing\)\.$"),
        (f"{__name__}:of_no_data", rf"StopIteration, {HERE}.*is the data set empty"),
        (f"{__name__}:too_narrow", r"Layer 1 of 'backbone' \(Linear\) raised an error for this"),
        (f"{__name__}:too_narrow_inside", rf"Layer 1 of 'backbone' \(Narrow\).*, {HERE} \(forw"),
    ],
)
def test_the_command_says_what_is_wrong(factory: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", factory, "--devices", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def made(:", r"can't be imported: SyntaxError: .*{name}\.py, line 1"),
        (
            "\nx = 1 / 0",
            r"can't be imported: ZeroDivisionError: .*, at .*{name}\.py:2 \(<module>\)\.$",
        ),
        (
            "import noware",
            r"can't be imported: .* named 'noware', at .*{name}\.py:1 \(<module>\)\.$",
        ),
    ],
)
def test_what_is_wrong_in_the_users_file_is_told(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match=message.format(name=name)):
        cli.main(["plan", f"{name}:made", "--devices", "2"])


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


class Failing(Warming):
    def __init__(self) -> None:
        raise KeyError("width")


class WithoutData(Warming):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(0, 8)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\x00\xb8", r"(?s)users\.yaml can't be read as `fit` .*can't decode"),
        (
            f"model: {__name__}.Failing".encode(),
            rf"What .*users\.yaml names can't be made: KeyError: 'width', {HERE} \(__init__\)\.$",
        ),
        (
            f"model: {__name__}.WithoutData".encode(),
            "train_dataloader.* of WithoutData gives no batch",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    file.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", str(file), "--devices", "2"])


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
        ([], "Where the script names the classes, .* give --model package.module:Model --data"),
        ([*DIGITS, "--trainer.speed=9"], "speed"),
        ([*DIGITS, "--devices=0"], "devices must be a whole number from 1"),
        ([*DIGITS, "--trainer.devices=auto"], "give --devices"),
        ([*DIGITS, "--no-data"], "no example_input_array"),
        ([*DIGITS, "--trainer.strategy=ddp"], "strategy is DDPStrategy, and pipelines"),
        ([*DIGITS, "--data.batch_size=-1"], "The data can't be loaded"),
        (["--model", f"{__name__}:made"], "--model must name a class .* is of type function"),
        (["--model", DIGITS[3]], "a LightningModule .*:DigitsData is the class DigitsData"),
        (["--data", DIGITS[1]], "a LightningDataModule .*:DigitsModel is the class DigitsModel"),
    ],
)
def test_what_a_file_lacks_is_told(example: str, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", example, *arguments])


def test_a_class_that_is_named_twice_is_told(tmp_path: Path) -> None:
    file = tmp_path / "warming.yaml"
    file.write_text(f"trainer: {{devices: 2, strategy: gpipe}}\nmodel: {__name__}.Warming\n")
    with pytest.raises(SystemExit, match="If the file names the classes itself, leave out --model"):
        cli.main(["plan", str(file), "--model", f"{__name__}:Warming"])


def test_what_goes_with_a_file_alone_is_told() -> None:
    for given, go in ((["--trainer.devices=2"], "goes"), (["--no-data"], "these go")):
        with pytest.raises(SystemExit, match=f"{go} with a configuration file alone"):
            cli.main(["plan", f"{__name__}:made", "--devices", "2", *given])
    with pytest.raises(SystemExit, match="--memroy 16GB: is no option of plan"):
        cli.main(["plan", f"{__name__}:made", "--devices", "2", "--memroy", "16GB"])
    with pytest.raises(SystemExit, match=r"a number above 0 with its unit, .*, got memory='16'"):
        cli.main(["plan", f"{__name__}:made", "--devices", "2", "--memory", "16"])
    with pytest.raises(SystemExit, match=r"There is no file nowhere\.yaml"):
        cli.main(["plan", "nowhere.yaml"])
