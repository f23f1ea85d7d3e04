"""Runs the code of a page of the documentation, as a script that a reader would copy.

    python tests/pages.py PAGE [--devices N] [--steps N]

All ``python`` blocks of a page share a namespace. One below the comment ``<!-- not run: why -->``
is left out. What several pages need in order to be short stands in PREAMBLE.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

_BLOCK = re.compile(r"(<!-- not run: .+? -->\n+)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: What a page may use without saying so.
PREAMBLE = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy


class Model(L.LightningModule):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.Linear(width, 10))

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(images), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(64, 64), torch.arange(64) % 10), batch_size=32)
batch = next(iter(loader))
model = Model()
"""


def blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks of a page that are run, each with the line before it."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        if match[1] is None:
            found.append((text.count("\n", 0, match.start(2)), match[2]))
    return found


def left_out(page: Path) -> int:
    """How many blocks of a page are not run."""
    return sum(match[1] is not None for match in _BLOCK.finditer(page.read_text()))


def run(page: Path, devices: int | None = None, steps: int | None = None) -> dict[str, Any]:
    """Run a page.

    Args:
        page: The file.
        devices: In place of those that it says; None: as it says.
        steps: After which each fit ends, without a word; None: as it says.

    Returns:
        Its namespace.
    """
    names: dict[str, Any] = {"__name__": "page", "__file__": str(page)}
    with quietly(steps):
        exec(compile(PREAMBLE, "the preamble of tests/pages.py", "exec"), names)
        for line, code in blocks(page):
            if devices is not None:
                code = re.sub(r"\bdevices=\d+", f"devices={devices}", code)
            exec(compile("\n" * line + code, str(page), "exec"), names)
    return names


@contextmanager
def quietly(steps: int | None) -> Iterator[None]:
    """Let every Trainer say little, and end after some steps; None: as it says."""
    if steps is None:
        yield
        return
    soon = {"max_steps": steps, "limit_val_batches": 1, "limit_test_batches": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    ordinary: Any = L.Trainer.__init__

    def init(self: L.Trainer, **options: Any) -> None:
        logging = {"logger": False} if "logger" not in options else {}
        ordinary(self, **{"accelerator": "cpu", **logging, **options, **soon, **quiet})

    L.Trainer.__init__ = init  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        L.Trainer.__init__ = ordinary  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the code of a page of the documentation.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--devices", type=int, help="in place of the page's")
    parser.add_argument("--steps", type=int, help="after which each fit ends")
    arguments = parser.parse_args()
    run(arguments.page, arguments.devices, arguments.steps)


if __name__ == "__main__":
    main()
