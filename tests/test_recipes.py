"""The code of the pages in docs/recipes trains with two stages as with a plain Trainer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import timm
import torch
import torchvision
import transformers
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import ConvNeXt, ResNet, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import VGG, make_layers
from transformers import BertConfig, GPT2Config

from lightning_gpipe import GPipeStrategy
from tests.ranks import RankError, run_ranks
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


def small_vgg(num_classes: int, dropout: float) -> nn.Module:
    """VGG-16's layers, with an eighth of the channels."""
    layout = [8, 8, "M", 16, 16, "M", 32, 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M"]
    net = VGG(make_layers(layout), num_classes, dropout=dropout)
    for place, (width_in, width_out) in {0: (64 * 7 * 7, 32), 3: (32, 32), 6: (32, 10)}.items():
        net.classifier[place] = nn.Linear(width_in, width_out)
    return net


def small_convnext(num_classes: int, stochastic_depth_prob: float) -> nn.Module:
    widths = 16, 24, 32, 40, None
    blocks = [CNBlockConfig(widths[n] or 0, widths[n + 1], 2) for n in range(4)]
    return ConvNeXt(blocks, stochastic_depth_prob, num_classes=num_classes)


#: What a page calls, and what makes a smaller model of the same class in its place.
SMALLER: dict[str, tuple[Any, str, Callable[..., nn.Module]]] = {
    "resnet50": (
        torchvision.models,
        "resnet50",
        partial(ResNet, Bottleneck, [1, 2, 1, 1], groups=4, width_per_group=4),
    ),
    "vgg16": (torchvision.models, "vgg16", small_vgg),
    "convnext": (torchvision.models, "convnext_tiny", small_convnext),
    "vit": (
        torchvision.models,
        "vit_b_16",
        partial(
            VisionTransformer, patch_size=16, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=64
        ),
    ),
    "timm_vit": (timm, "create_model", partial(timm.create_model, depth=4)),
    "timm_convnext": (
        timm,
        "create_model",
        partial(timm.create_model, depths=(1, 1, 2, 1), dims=(16, 24, 32, 40)),
    ),
}

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    **dict(zip(("pad_token_id", "bos_token_id", "eos_token_id"), range(3), strict=True)),
}
IN_TURN = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
DISTILBERT = {
    "vocab_size": 97,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 4,
    "n_heads": 2,
    **dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0),
}
BART = {
    "vocab_size": 97,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "use_cache": False,
}
T5: dict[str, Any] = {
    **{"vocab_size": 97, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 4, "num_heads": 4},
    **{"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0},
}
#: What makes a model, and its configuration; the page says where its blocks are.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TINY),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**TINY, "sliding_window": 4}),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TINY, "num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**TINY, "use_sliding_window": True, **IN_TURN}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**TINY, "head_dim": 8, **IN_TURN}),
    "DistilBert": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT),
    "Bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
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
    with pytest.MonkeyPatch.context() as patch:
        if name in SMALLER:
            patch.setattr(*SMALLER[name])
        exec(code, page)
        module = page["Model"](*arguments())
    step = "micro-batch" if 'step="micro-batch"' in code else "mini-batch"
    return train(module, data(kind), chunks, stages, step)


def train(
    module: L.LightningModule, loader: Any, chunks: int, stages: int, step: Any = "micro-batch"
) -> list[float]:
    found: list[float] = []

    def keep(run: L.Trainer, *_: Any) -> None:
        found.append(run.callback_metrics["loss"].item())

    pipeline = {"strategy": GPipeStrategy(chunks, step=step), "devices": stages} if stages else {}
    run = trainer(
        **{"devices": 1, **pipeline},
        max_epochs=1,
        callbacks=[LambdaCallback(on_train_batch_end=keep)],
    )
    run.fit(module, loader)
    return found


class Family(L.LightningModule):
    """A model of Hugging Face."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind, config, options = FAMILIES[name]
        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        (line,) = re.findall(
            rf"^\| {name}\b.*?\| `(.*)` \|$", (PAGES / "transformers.md").read_text(), re.MULTILINE
        )
        assert isinstance(model.get_submodule(line), nn.ModuleList)
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def family_losses(name: str, stages: int) -> list[float]:
    warnings.simplefilter("ignore")
    L.seed_everything(2, verbose=False)
    return train(Family(name), data("sentences" if name == "DistilBert" else "tokens"), 4, stages)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name: str) -> None:
    plain = losses(name, 0)
    assert len(set(plain)) == STEPS
    for found in run_ranks(losses, 2, name, 2, timeout_s=240):
        assert found == pytest.approx(plain, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_other_models_of_hugging_face(name: str) -> None:
    plain = family_losses(name, 0)
    assert len(set(plain)) == STEPS
    for found in run_ranks(family_losses, 2, name, 2):
        assert found == pytest.approx(plain, abs=1e-5)


class Records(Family):
    """A Llama that is told to record something of its blocks.

    Args:
        what: What it records.
        reads: Whether the step uses it.
    """

    def __init__(self, what: str, reads: bool) -> None:
        super().__init__("Llama")
        self.model.set_attn_implementation("eager")  # which has weights to record
        setattr(self.model.config, f"output_{what}", True)
        self.what, self.reads = what, reads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("loss", output.loss)
        assert getattr(output, self.what) is not None
        return output.loss + (output.hidden_states[1].mean() if self.reads else 0.0)


def recorded(stages: int, what: str, reads: bool) -> list[float]:
    L.seed_everything(2, verbose=False)
    return train(Records(what, reads), data("tokens"), 4, stages)


@pytest.mark.parametrize("stages", [1, 2])
def test_hidden_states_that_nobody_uses_may_be_recorded(stages: int) -> None:
    plain = recorded(0, "hidden_states", False)
    for found in run_ranks(recorded, stages, stages, "hidden_states", False):
        assert found == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(
    ("what", "reads", "problem"),
    [
        ("hidden_states", True, "The model records hidden_states of its blocks.*and uses them"),
        ("attentions", False, "The model records attentions of its blocks"),
    ],
)
def test_what_is_recorded_cannot_be_used(what: str, reads: bool, problem: str) -> None:
    with pytest.raises(RankError, match=problem):
        run_ranks(recorded, 2, 2, what, reads)


def test_every_page_is_tested() -> None:
    others = {"README", "transformers"}
    scripts = {
        "gpt_from_scratch",
        "mixture_of_experts",
        "momentum_teacher",
        "unet",
        "vae",
        "contrastive",
        "fine_tuning",
    }
    assert {path.stem for path in PAGES.glob("*.md")} - others - scripts == RECIPES.keys()
