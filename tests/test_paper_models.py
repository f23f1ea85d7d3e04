"""The models of the GPipe paper: as large as it says, and trained over stages as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.models.amoebanet import amoebanet_d
from examples.models.parts import FeedForward
from examples.models.transformer import transformer
from examples.models.translation import translation
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.model.run_layer import run_layer
from lightning_gpipe.plan.balance import Balancing
from lightning_gpipe.plan.settings import Settings
from tests.ranks import run_ranks
from tests.training import train

PADDING, VOCABULARY, SAMPLES = 0, 23, 8


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw random numbers takes most of the time in which a model is built, even on meta."""
    for kind in (nn.Linear, FeedForward, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm, nn.Embedding):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.usefixtures("without_values")
@pytest.mark.parametrize(
    ("layers", "parameters"),
    [
        (3, 282_146_816),
        (13, 785_729_536),
        (103, 5_317_974_016),
        (415, 21_029_754_880),
        (1663, 83_876_878_336),
    ],
)
def test_transformers_have_as_many_parameters_as_in_table_1(layers: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(transformer(layers)) == parameters


@pytest.mark.usefixtures("without_values")
@pytest.mark.parametrize(
    ("cells", "width", "parameters"),
    [
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 512, 481_268_200),
        (18, 544, 542_734_840),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ],
)
def test_amoebanets_have_as_many_parameters_as_others_count(
    cells: int, width: int, parameters: int
) -> None:
    with torch.device("meta"):
        layers = amoebanet_d(cells, width, 1000)
    assert count(layers) == parameters
    assert len(layers) == cells + 6


@pytest.mark.usefixtures("without_values")
@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        ((6, 8192, 16), 0.4),
        ((24, 8192, 16), 1.3),
        ((12, 16384, 32), 1.3),
        ((32, 16384, 32), 3),
        ((64, 16384, 32), 6),
    ],
)
def test_translation_models_are_as_large_as_in_section_5(
    sizes: tuple[int, int, int], billions: float
) -> None:
    with torch.device("meta"):
        assert count(translation(*sizes)) == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.usefixtures("without_values")
@pytest.mark.parametrize(("stages", "at_most"), [(2, 0.53), (4, 0.27), (8, 0.15)])
def test_amoebanet_is_cut_into_shares(stages: int, at_most: float) -> None:
    with torch.device("meta"):
        layers = amoebanet_d(18, 256, 1000)
        images = torch.empty(4, 3, 224, 224)
    settings = Settings(32, stages, None, "flops", "except_last", True)
    balancing = Balancing(layers, run_layer, images, measure=list, warn=pytest.fail)
    partition = balancing.partition(stages, settings)
    assert 1 / stages <= max(partition.shares) <= at_most


class Classifier(L.LightningModule):
    """A small model of a kind, with its data, in double precision."""

    def __init__(self, kind: str, on_meta: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        with torch.device("meta" if on_meta else "cpu"):
            if kind == "amoebanet":
                self.layers = amoebanet_d(3, 16, 5)
            elif kind == "transformer":
                self.layers = transformer(3, 16, 24, 2, VOCABULARY, 0.0, True, 2.0)
            else:
                self.layers = translation(2, 24, 1, 16, VOCABULARY, PADDING, 0.0, True, 2.0)
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        *given, labels = batch
        logits = self.layers(given[0] if len(given) == 1 else tuple(given))
        loss = nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=PADDING
        )
        return {"loss": loss, "weight": (labels != PADDING).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        samples = 2 * SAMPLES
        if self.kind == "amoebanet":
            images = torch.randn(samples, 3, 32, 32, generator=generator, dtype=torch.float64)
            given = images, torch.randint(1, 5, (samples,), generator=generator)
        else:
            tokens = torch.randint(1, VOCABULARY, (3, samples, 7), generator=generator)
            for text in tokens:  # of several lengths
                ends = torch.randint(3, 8, (samples, 1), generator=generator)
                text[torch.arange(7) >= ends] = PADDING
            given = (*tokens[0 if self.kind == "translation" else 1 :],)
        return DataLoader(TensorDataset(*given), SAMPLES)


#: The kind of model, the step, and whether it is built on the meta device.
RUNS = [
    ("amoebanet", "mini-batch", False),
    ("transformer", "micro-batch", False),
    ("translation", "micro-batch", True),
]


def trained(stages: int) -> list[dict[str, Tensor]]:
    """The weights after each run of :data:`RUNS`."""
    results = []
    for kind, step, on_meta in RUNS:
        module = Classifier(kind, on_meta)
        strategy = GPipeStrategy(4, stages=stages, step=step)  # type: ignore[arg-type]
        L.seed_everything(3, verbose=False)
        train(module, devices=stages, strategy=strategy, max_epochs=1)
        if on_meta:
            strategy.restore_module()
        results.append(module.state_dict())
    return results


def test_they_train_on_four_stages_as_on_one() -> None:
    ones, fours = (run_ranks(trained, stages, stages)[0] for stages in (1, 4))
    for run, one, four in zip(RUNS, ones, fours, strict=True):
        assert list(one) == list(four), run
        for name, tensor in one.items():
            torch.testing.assert_close(
                four[name], tensor, rtol=0, atol=0, msg=lambda m, n=name, r=run: f"{r} {n}: {m}"
            )
        kind, _, on_meta = run
        if not on_meta:
            assert any(
                not torch.equal(tensor, one[name])
                for name, tensor in Classifier(kind, False).state_dict().items()
            )
        if kind == "transformer":  # the batch norm of AmoebaNet sees micro-batches
            plain = train(Classifier(kind, False), devices=1, max_epochs=1)
            for name, tensor in plain.items():
                torch.testing.assert_close(one[name], tensor, rtol=1e-8, atol=1e-10)


def test_a_token_is_told_by_those_before_it() -> None:
    tokens = torch.randint(1, VOCABULARY, (2, 3, 9))
    source, target = tokens
    changed = target.clone()
    changed[:, 5:] = 1
    model = transformer(2, 16, 24, 2, VOCABULARY)
    torch.testing.assert_close(model(target)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(target)[:, 5:], model(changed)[:, 5:])
    model = translation(2, 24, 2, 16, VOCABULARY, PADDING)
    logits = model((source, target))
    torch.testing.assert_close(logits[:, :5], model((source, changed))[:, :5])
    longer = nn.functional.pad(source, (0, 4), value=PADDING)
    torch.testing.assert_close(logits, model((longer, target)))
    assert not torch.allclose(logits, model((source.flip(1), target)))


def test_deep_models_are_kept_stable() -> None:
    torch.manual_seed(1)
    plain = transformer(4, 16, 24, 2, VOCABULARY)
    torch.manual_seed(1)
    scaled = transformer(4, 16, 24, 2, VOCABULARY, scale_feed_forward=True, clip_logits=0.5)
    found = dict(scaled.named_parameters())
    for name, parameter in plain.named_parameters():
        is_scaled = "feed_forward" in name and name.endswith("weight")
        torch.testing.assert_close(found[name], parameter / 4 if is_scaled else parameter)
    tokens = torch.randint(1, VOCABULARY, (2, 5))
    assert plain(tokens).abs().max() > 0.5 == scaled(tokens).abs().max()
