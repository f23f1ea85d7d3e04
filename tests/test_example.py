"""The README's main job, as a newcomer runs it."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests import scripts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "digits.py"
LANGUAGE_MODEL = ROOT / "examples" / "language_model.py"
IMAGES = ROOT / "examples" / "images.py"
TRANSLATION = ROOT / "examples" / "translation.py"


def run(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLE), *arguments]
    code, screen = scripts.run(command, timeout=240, cwd=cwd)
    assert code == 0, screen
    return screen


def test_digits(tmp_path: Path) -> None:
    screen = run("--epochs", "3", cwd=tmp_path)
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


def figures(screen: str) -> dict[str, float]:
    """What an example has reached, and what it is beside; checks that it says what it cost."""
    found = re.findall(r"^([A-Z][a-z ]+): +(\d+\.\d+)$", screen, re.MULTILINE)
    assert re.search(r"^Time: +\d+ s$", screen, re.MULTILINE), screen
    assert re.search(r"^Threads: +1 in each$", screen, re.MULTILINE), screen
    assert re.search(r"^Logs: +\S+$", screen, re.MULTILINE), screen
    return {name: float(value) for name, value in found}


def on_one_and_two(example: Path, *arguments: str, cwd: Path) -> list[str]:
    """What an example prints with one stage and with two."""
    screens = []
    for stages in (1, 2):
        command = [sys.executable, str(example), *arguments, "--stages", str(stages)]
        code, screen = scripts.run(command, timeout=120, cwd=cwd)
        assert code == 0, screen
        peaks = re.search(r"^Peak memory: +(.+) MB", screen, re.MULTILINE)
        assert peaks, screen
        assert len(peaks[1].split(", ")) == stages
        screens.append(screen)
    return screens


def test_language_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 120)
    screens = on_one_and_two(LANGUAGE_MODEL, "--epochs", "1", "--file", str(text), cwd=tmp_path)
    assert [screen.count("Sample:") for screen in screens] == [1, 1]
    one, two = map(figures, screens)
    assert one == pytest.approx(two, rel=1e-6)
    assert set(one) == {"Perplexity", "Unigram perplexity"}


def test_images(tmp_path: Path) -> None:
    arguments = ("--model", "resnet", "--epochs", "1", "--depth", "1", "--width", "8")
    one, two = map(figures, on_one_and_two(IMAGES, *arguments, "--size", "8", cwd=tmp_path))
    assert one == two
    assert set(one) == {"Loss", "Accuracy", "Most frequent class"}
    assert one["Accuracy"] > 2 * one["Most frequent class"]


def test_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, samples in (("train", 3), ("val", 2)):
        for kind in ("dark", "light"):
            path = tmp_path / part / kind
            path.mkdir(parents=True)
            for i in range(samples):
                Image.new("L", (9, 12), 100 + 100 * (kind == "light")).save(path / f"{i}.png")
    monkeypatch.setattr(sys, "path", [str(IMAGES.parent), *sys.path])
    images = runpy.run_path(str(IMAGES))
    parts = images["of_torchvision"](argparse.Namespace(folder=tmp_path, size=8))
    data = images["Images"](*parts)
    assert data.most_frequent() == 0.5
    assert [len(part) for part in parts] == [6, 4]
    image, label = data.val[-1]
    assert image.shape == (3, 8, 8)
    assert image.mean() == pytest.approx(200 / 255)
    assert label == 1


def test_translation(tmp_path: Path) -> None:
    words = "one uno", "two dos", "three tres", "four cuatro"
    pairs = [(*a.split(), *b.split()) for a in words for b in words]
    lines = [(f"{a} {b}", f"{other} {one}") for a, one, b, other in pairs * 5]
    files = [tmp_path / name for name in ("text.en", "text.es")]
    for file, texts in zip(files, zip(*lines, strict=True), strict=True):
        file.write_text("\n".join(texts))
    sizes = ("--layers", "1", "--heads", "1", "--width", "32", "--hidden", "64", "--epochs", "2")
    arguments = (*sizes, "--file", *map(str, files))
    one, two = map(figures, on_one_and_two(TRANSLATION, *arguments, cwd=tmp_path))
    assert one == two
    assert set(one) == {
        "Perplexity", "Accuracy of tokens", "Most frequent token", "Copy of the source",
    }  # fmt: skip


def test_verses_are_pairs() -> None:
    lines = (TRANSLATION.parent / "data" / "verses.tsv").read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split("\t")) for line in lines]
    assert len(pairs) == len({english for english, *_ in pairs}) == 1076
    assert all(len(english) <= 60 and len(spanish) <= 60 for english, spanish, _ in pairs)


def test_digits_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["digits.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 0
    screen = capsys.readouterr().out
    for option in ("--stages", "--chunks", "--checkpoint", "--epochs", "--logger {csv,wandb}"):
        assert option in screen
