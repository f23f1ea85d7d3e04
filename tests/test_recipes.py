"""The code of the pages in docs/recipes trains with two stages as with a plain Trainer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader
from transformers import BertConfig, GPT2Config

from lightning_gpipe import GPipeStrategy
from tests.ranks import run_ranks
from tests.training import trainer

PAGES = Path(__file__).parents[1] / "docs" / "recipes"
STEPS, SAMPLES = 3, 8
GPT2 = {
    "vocab_size": 97,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 2,
    "use_cache": False,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
}
BERT = {
    "vocab_size": 97,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}

#: What the model gets, what the data are, and M: 1 for batch norm, which sees micro-batches.
RECIPES: dict[str, tuple[Callable[[], tuple[Any, ...]], str, int]] = {
    "resnet50": (lambda: (10,), "images of 64", 1),
    "vgg16": (lambda: (10, 0.0), "images of 32", 4),
    "convnext": (lambda: (10, 0.0), "images of 64", 4),
    "vit": (lambda: (10, 32), "images of 32", 4),
    "timm_vit": (lambda: (10, 32), "images of 32", 4),
    "timm_convnext": (lambda: (10,), "images of 64", 4),
    "gpt2": (lambda: (GPT2Config(**GPT2),), "tokens", 4),
    "bert": (lambda: (BertConfig(**BERT),), "sentences", 4),
}


def data(kind: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    samples: list[Any] = []
    for _ in range(STEPS * SAMPLES):
        label = torch.randint(0, 2, (), generator=generator)
        if kind.startswith("images"):
            size = int(kind.split()[-1])
            samples.append((torch.randn(3, size, size, generator=generator), label))
            continue
        ids = torch.randint(2, 97, (16,), generator=generator)
        mask = (torch.arange(16) < 12 + 4 * label).long()
        samples.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": ids if kind == "tokens" else label,
            }
        )
    return DataLoader(samples, batch_size=SAMPLES)


def losses(name: str, stages: int) -> list[float]:
    """Train as the page says."""
    warnings.simplefilter("ignore")
    L.seed_everything(2, verbose=False)
    arguments, kind, chunks = RECIPES[name]
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL)
    page: dict[str, Any] = {"__name__": f"recipe_{name}"}
    exec(code, page)
    found: list[float] = []

    def keep(run: L.Trainer, *_: Any) -> None:
        found.append(run.callback_metrics["loss"].item())

    pipeline = {"strategy": GPipeStrategy(chunks), "devices": stages} if stages else {}
    run = trainer(
        **{"devices": 1, **pipeline},
        max_epochs=1,
        callbacks=[LambdaCallback(on_train_batch_end=keep)],
    )
    run.fit(page["Model"](*arguments()), data(kind))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name: str) -> None:
    plain = losses(name, 0)
    assert len(set(plain)) == STEPS
    for found in run_ranks(losses, 2, name, 2, timeout_s=240):
        assert found == pytest.approx(plain, abs=1e-5)


def test_every_page_is_tested() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == RECIPES.keys()
