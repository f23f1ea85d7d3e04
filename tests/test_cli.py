"""Lightning's command line with the example's configuration files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import scripts

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning uses what jsonargparse deprecates
STRATEGY = "--trainer.strategy.init_args"


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command line in this process, as far as the parser."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("train")

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        module.main()

    return call


def test_the_configuration_is_readable(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("fit", "--config", str(EXAMPLES / "gpipe.yaml"), "--print_config")
    assert ended.value.code == 0
    strategy = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_gpipe.GPipeStrategy"
    settings = strategy["init_args"]
    assert settings["chunks"] == 8
    assert settings["stages"] == "auto"
    assert settings["balance"] == "flops"
    assert settings["timeout"] == "0:30:00"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("chunks=many", "chunks"),
        ("balance=flop", "balance"),
        ("checkpoint=some", "checkpoint"),
        ("start_method=quick", "start_method"),
        ("timeout=5", "timeout"),
        ("stagess=2", "stagess"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    parse: Any, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("fit", "--config", str(EXAMPLES / "gpipe.yaml"), f"{STRATEGY}.{argument}")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_number_out_of_range_is_refused_by_name(parse: Any) -> None:
    with pytest.raises(ValueError, match="chunks must be 'auto' or a whole number from 1"):
        parse("fit", "--config", str(EXAMPLES / "gpipe.yaml"), f"{STRATEGY}.chunks=0")


def test_the_short_name_is_kept(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("fit", "--trainer.strategy=gpipe", "--trainer.devices=2", "--print_config")
    assert ended.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == "gpipe"


def test_it_trains(tmp_path: Path) -> None:
    config = ["--config", str(EXAMPLES / "gpipe.yaml"), f"{STRATEGY}.chunks=64"]
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3"]
    command = [sys.executable, str(EXAMPLES / "train.py"), "fit", *config, *short]
    code, screen = scripts.run(command, 240, cwd=tmp_path)
    assert code == 0, screen
    assert "GPipe: 16 layers of 'backbone' on 2 stages, 64 micro-batches" in screen
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in screen
    (path,) = tmp_path.glob("*logs/**/config.yaml")
    saved = yaml.safe_load(path.read_text())["trainer"]["strategy"]
    assert saved["init_args"]["chunks"] == 64
