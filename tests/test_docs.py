"""The documentation's code runs, its recipes train alike on one stage and two, and it builds."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpipe.strategy.launcher import ScriptLauncher
from tests import pages, scripts
from tests.ranks import run_ranks
from tests.test_recipes import RECIPES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUNNER = ROOT / "tests" / "pages.py"
#: Pages whose code is a script: it trains on two stages.
WHOLE = sorted(
    path
    for path in (DOCS / "recipes").glob("*.md")
    if path.stem not in RECIPES and pages.blocks(path)
)
OTHERS = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.parent.name not in ("recipes", "_build") and pages.blocks(path)
)
STEPS = 2
STARTS = re.compile(r"\bdevices=2\b")


def named(path: Path) -> str:
    return path.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", OTHERS, ids=named)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(STARTS.search(code) for _, code in pages.blocks(page)):
        command = [sys.executable, str(RUNNER), str(page), "--steps", str(STEPS)]
        code, screen = scripts.run(command, 240, cwd=tmp_path)
        assert code == 0, screen
        return

    def launch(*_: Any, **__: Any) -> None:
        raise AssertionError("a page that starts processes says devices=2")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScriptLauncher, "launch", launch)
    pages.run(page, steps=STEPS)


def weights(page: Path, folder: Path, devices: int) -> tuple[dict[str, Any], int]:
    """Train as a recipe says; returns the weights, and the number of stages."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        names = pages.run(page, devices, STEPS)
    finally:
        os.chdir(before)
    trainer = names["trainer"]
    assert trainer.global_step == STEPS
    return names["model"].state_dict(), trainer.strategy.stages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WHOLE, ids=named)
def test_a_recipe_trains_alike_on_one_stage_and_two(page: Path, tmp_path: Path) -> None:
    one, stages = weights(page, tmp_path, 1)
    assert stages == 1
    for two, stages in run_ranks(weights, 2, page, tmp_path, 2):
        assert stages == 2
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, two[name]), name


def test_few_blocks_are_left_out() -> None:
    assert len(WHOLE) == 7
    left_out = {named(page): pages.left_out(page) for page in DOCS.rglob("*.md")}
    assert {page: count for page, count in left_out.items() if count} == {
        "guide/cli": 1,
        "guide/debugging": 1,
        "migrating": 1,
    }


def test_a_page_that_fails_is_told_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\nMore:\n\n```python\nx.append(2)\n```")
    with pytest.raises(AttributeError, match="append") as caught:
        pages.run(page)
    last = caught.traceback[-1]
    assert (Path(last.path), last.lineno + 1) == (page, 10)


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    options = "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path / "html")
    code, screen = scripts.run([sys.executable, "-m", "sphinx", *options], 240, cwd=ROOT)
    assert code == 0, screen
    pictures = {
        "index.html": "aria-label",
        "design.html": "rank 2, stage 2",
        "api.html": "usage: lightning-gpipe plan",
    }
    for name, text in pictures.items():
        assert text in (tmp_path / "html" / name).read_text(), name
