"""The README's main job, as a newcomer runs it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "digits.py"
LANGUAGE_MODEL = ROOT / "examples" / "language_model.py"


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_digits(tmp_path: Path) -> None:
    screen = run("--epochs", "6", cwd=tmp_path)
    accuracy = re.search(r"^Test accuracy: (\S+)$", screen, re.MULTILINE)
    assert accuracy, screen
    assert float(accuracy[1]) >= 0.97
    assert "Stage | Device | Layers" in screen
    assert "Expected bubble" in screen
    assert "train_loss" in screen
    for line in ("Checkpoint:", "Logs:"):
        path = re.search(rf"^{line} +(\S+)$", screen, re.MULTILINE)
        assert path, screen
        assert (tmp_path / path[1]).exists()


def test_language_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    found = []
    for stages in ("1", "2"):
        arguments = "--stages", stages, "--epochs", "2", "--file", str(text)
        code, screen = scripts.run(
            [sys.executable, str(LANGUAGE_MODEL), *arguments], 240, cwd=tmp_path
        )
        assert code == 0, screen
        assert screen.count("Sample:") == 2, screen
        names = "Perplexity", "Unigram perplexity"
        lines = (re.search(rf"^{name}: +(\S+)$", screen, re.MULTILINE) for name in names)
        found.append([float(line[1]) for line in lines if line])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert len(found[0]) == 2


def test_digits_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["digits.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    for option in ("--stages", "--chunks", "--checkpoint", "--epochs", "--logger {csv,wandb}"):
        assert option in screen
