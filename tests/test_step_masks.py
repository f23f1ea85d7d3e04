"""What masks of the batch choose in steps that run once per micro-batch, and means of it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_gpipe import GPipeStrategy
from tests import step_models as models
from tests.ranks import run_ranks
from tests.training import trainer

WEIGHTS = torch.arange(1, models.VOCABULARY + 1).double() / 3


class Chosen(models.Language):
    """Trains by what masks of several kinds choose; some micro-batches have none of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, _ = batch
        logits, mask = self(tokens), tokens > 6
        parts = [
            logits[mask.numpy()].pow(2),
            logits[np.asarray(tokens) > 6].exp(),
            logits.masked_select(mask=mask[..., None]),
            torch.masked_select(input=logits, mask=mask[..., None]).square(),
            logits[mask.any(), mask],
        ]
        self.log("number", float(parts[-1].numel()), reduce_fx="sum")
        self.log("in a list", logits[(tokens[:, 0] > 6).tolist(), 1].mean())
        for i, part in enumerate(parts):
            self.log(f"part {i}", part.mean())
        return {"loss": sum(part.mean() for part in parts), "weight": mask.sum()}


class Few(models.Language):
    """Trains by samples that a mask chooses, of which some micro-batches have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        rows = tokens[:, 0] > 9
        scores, classes = self(tokens)[rows].flatten(0, 1), targets[rows].flatten()
        total = functional.cross_entropy(scores, classes, reduction="sum")
        loss = total / max(len(classes), 1)
        self.log("loss", loss)
        return {"loss": loss, "weight": rows.sum()}


class Validates(models.Language):
    """Logs and returns means over what a mask chooses."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits, mask = self(tokens), tokens > 6
        scores, classes = logits[mask], targets[mask]
        goal = functional.one_hot(classes, models.VOCABULARY).double() + 0.1
        signs = (goal - 0.5).sign()
        likely = scores.log_softmax(-1)
        losses = {
            "divergence": functional.kl_div(likely, goal, reduction="batchmean"),
            "of samples": functional.kl_div(logits, logits.detach() ** 2, reduction="batchmean"),
            "gaussian": functional.gaussian_nll_loss(scores, goal, goal),
            "poisson": functional.poisson_nll_loss(scores, goal),
            "soft": functional.soft_margin_loss(scores, signs),
            "margin": functional.multi_margin_loss(scores, classes, weight=WEIGHTS),
            "hinge": functional.hinge_embedding_loss(scores, signs),
            "cosine": functional.cosine_embedding_loss(scores, goal, signs[:, 0]),
            "triplet": functional.triplet_margin_loss(scores, goal, -goal),
            "shares": functional.cross_entropy(scores, goal, WEIGHTS),
            "weighted": functional.mse_loss(scores, goal, weight=goal),
            "absolute": functional.l1_loss(scores, goal, weight=goal),
        }
        self.log_dict(losses)
        self.log_dict({f"root of {name}": loss.abs().sqrt() for name, loss in losses.items()})
        return {
            "loss": functional.cross_entropy(scores, classes, WEIGHTS),
            "root": losses["poisson"].sqrt(),
        }


class InPlace(models.Language):
    """Changes means in place, and logs what is computed of them and of others."""

    def build(self) -> None:
        super().build()
        self.average, self.called = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.means(batch, "train")["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.means(batch, "val")

    def means(self, batch: Any, when: str) -> Any:
        tokens, targets = batch
        logits, mask = self(tokens), tokens > 6
        total: Any = 0
        for place in range(3):
            total += functional.cross_entropy(logits[:, place], targets[:, place])
        total /= 3
        self.log(f"{when} perplexity", total.exp())
        if when == "train":
            self.average.update(total)
            self.called(total)
            total += 0.1 * logits.pow(2).mean()
            self.log("average", self.average, on_step=False, on_epoch=True)
            self.log("called", self.called, on_step=False, on_epoch=True)
            return {"loss": total}
        found = functional.cross_entropy(logits[mask], targets[mask])
        right = (logits.argmax(-1) == targets)[mask].double().mean()
        shown = found.detach()
        self.log("shown", shown)
        found *= 0.5
        found -= 0.1 * logits[mask].mean()
        found += 1
        self.log_dict({"found": found, "root": found.sqrt(), "right": right})
        return {"loss": found, "error": (1 - right).sqrt()}


class Apart(models.Language):
    """Returns a loss of each sample."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        losses = functional.cross_entropy(self(tokens).mT, targets, reduction="none")
        return {"loss": losses.mean(1), "classes": targets}


class Outputs(models.L.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.outputs.append(args[2])


def run(kind: str, stages: int) -> Any:
    """The weights, what is logged and what steps return; with no stages, by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(4, step="micro-batch")}
    module, watch = globals()[kind](), Outputs()
    module.batch_size = 11
    own = trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[watch], **options)
    own.fit(module)
    return module.state_dict(), dict(own.callback_metrics), watch.outputs


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["Chosen", "Few", "Validates", "InPlace", "Apart", "Clamped"])
def test_as_a_plain_trainers(kind: str, stages: int) -> None:
    expected = run(kind, 0)
    for found in run_ranks(run, stages, kind, stages):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["Weighs", "Nothing", "Clamped"])
def test_what_is_no_mean_and_is_not_told_of(kind: str) -> None:
    (texts,) = run_ranks(told, 1, kind)
    assert not [text for text in texts if "mean over micro-batches" in text or "sum" in text]


def test_sums_of_what_is_chosen_are_told_of() -> None:
    (texts,) = run_ranks(told, 1, "Quotient")
    assert [text for text in texts if "'chosen'" in text and "divisors aren't" in text]


class Nothing(models.Language):
    """Adds nothing to its loss, for the graph's sake."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        logits = self(tokens)
        loss = functional.cross_entropy(logits[:, 0], targets[:, 0]) + 0.0 * logits.sum()
        self.log("loss", loss)
        return loss


class Clamped(models.Language):
    """Has a weight of 0 where it divides by another number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        rows = tokens[:, 0] > 9
        losses = functional.cross_entropy(self(tokens)[:, 0], targets[:, 0], reduction="none")
        loss = (losses * rows).sum() / rows.sum().clamp(min=1)
        self.log("loss", loss)
        return {"loss": loss, "weight": rows.sum()}


class Quotient(models.Language):
    """Divides what a mask chooses by a number that isn't one of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        losses = functional.cross_entropy(self(tokens).mT, targets, reduction="none")
        mask = tokens > 9
        self.log("chosen", losses[mask].sum() / torch.clamp_min(mask.sum(), 6))
        return losses.mean()


class Weighs(models.Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        loss = functional.cross_entropy(self(tokens)[:, 0], targets[:, 0], WEIGHTS)
        return {"loss": loss, "weight": WEIGHTS[targets[:, 0]].sum()}


def told(kind: str) -> list[str]:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        strategy = GPipeStrategy(4, step="micro-batch")
        trainer(max_epochs=1, strategy=strategy, devices=1).fit(globals()[kind]())
    return [str(warning.message) for warning in seen]
