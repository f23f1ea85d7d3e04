"""Weights that steps return which run once per micro-batch, for some mini-batches or replicas."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.nn import functional

from lightning_gpipe import GPipeStrategy
from tests import step_models as models
from tests.ranks import RankError, run_ranks
from tests.training import trainer


class Weighted(models.Language):
    """A mean over tokens in the mini-batches of some numbers, over samples in the others."""

    numbers: set[int]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        if batch_idx not in self.numbers:
            return self.loss(batch)
        lengths = tokens[:, :1] % models.LENGTH
        targets = targets.masked_fill(torch.arange(models.LENGTH) > lengths, -100)
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        return {"loss": loss, "weight": (targets != -100).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logs(Weighted):
    """Means over samples, beside a loss that is a mean over the tokens that a mask chooses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        mask = torch.arange(models.LENGTH) <= tokens[:, :1] % models.LENGTH
        logits = self(tokens)
        loss = functional.cross_entropy(logits[mask], targets[mask])
        first = functional.cross_entropy(logits[:, 0], targets[:, 0])
        norms = functional.mse_loss(logits, torch.zeros_like(logits))
        self.log("loss", loss)
        self.log("length", mask.sum(1).double().mean())
        self.log("score", logits.mean())
        self.log("norms", norms.sqrt())
        self.log("perplexity", first.exp())
        self.log("all", loss + 0.1 * first + norms, on_step=True, on_epoch=True)
        return {"loss": loss, "weight": mask.sum()}


class OnOneReplica(models.Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        sampler = self.trainer.distributed_sampler_kwargs or {}
        return {"loss": loss, "weight": float(len(batch[0]))} if sampler.get("rank") else loss


class OfFew(models.Language):
    """The mini-batches of these numbers have nothing to predict: momentum moves weights on."""

    numbers: set[int]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        mask = (tokens > 1).double() * (batch_idx not in self.numbers)
        losses = functional.cross_entropy(self(tokens).mT, targets, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=1), "weight": mask.sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LeavesOut(OfFew):
    """Leaves these mini-batches out, whatever their losses are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = models.Language.loss(self, batch)
        is_out = batch_idx in self.numbers
        return {"loss": found * torch.nan, "weight": 0} if is_out else {"loss": found, "weight": 1}


def fit(kind: str, stages: int, numbers: set[int], virtual: int = 1, replicas: int = 1) -> Any:
    """Train; with no stages by a plain Trainer."""
    options: dict[str, Any] = {}
    if stages:
        strategy = GPipeStrategy(4, stages=stages, virtual_stages=virtual, step="micro-batch")
        options = {"devices": stages * replicas, "strategy": strategy}
    module: Any = globals()[kind]()
    module.numbers = numbers
    trainer(max_steps=2, max_epochs=1, accumulate_grad_batches=2, **options).fit(module)
    return module.state_dict()


@pytest.mark.parametrize("stages", [1, 2])
def test_mini_batches_with_weights_and_without(stages: int) -> None:
    """What accumulates without weights is as it was, before and behind those with some."""
    numbers = {0, 3}
    expected = fit("Weighted", 0, numbers)
    for found in run_ranks(fit, stages, "Weighted", stages, numbers):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stages", [1, 2])
def test_mini_batches_of_nothing(stages: int) -> None:
    for numbers in {1}, {0, 1}, {2, 3}:
        expected = fit("OfFew", 0, numbers)
        for found in run_ranks(fit, stages, "OfFew", stages, numbers):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stages", [1, 2])
def test_mini_batches_that_do_not_count_change_nothing(stages: int) -> None:
    found = run_ranks(fit, stages, "LeavesOut", stages, {0, 1, 2, 3})[0]
    torch.testing.assert_close(found, LeavesOut().state_dict(), rtol=0, atol=0)


def logged(stages: int) -> Any:
    """The weights, and what is logged, of a run."""
    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(4, step="micro-batch")}
    module, run = Logs(), trainer(max_epochs=1, **options)
    run.fit(module)
    return module.state_dict(), dict(run.callback_metrics)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_weight_is_that_of_the_loss_alone(stages: int) -> None:
    """Means over samples, or over all elements, count by these."""
    expected = logged(0)
    assert len(expected[1]) > 7
    for found in run_ranks(logged, stages, stages):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def returned(stages: int, is_number: bool) -> list[Any]:
    """The weights that callbacks get."""
    seen = list[Any]()

    class Sees(L.Callback):
        def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
            seen.append(outputs["weight"])

    class Returns(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            return {**found, "weight": len(batch[0])} if is_number else found

    options: dict[str, Any] = {}
    if stages:
        options = {"devices": stages, "strategy": GPipeStrategy(4, step="micro-batch")}
    trainer(max_steps=2, callbacks=[Sees()], **options).fit(Returns())
    return seen


@pytest.mark.parametrize("is_number", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_weights_are_returned_as_they_were_given(stages: int, is_number: bool) -> None:
    expected = returned(0, is_number)
    for found in run_ranks(returned, stages, stages, is_number):
        torch.testing.assert_close(found, expected)
        assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize("stages", [1, 2])
def test_first_weights_after_gradients_without(stages: int) -> None:
    with pytest.raises(RankError, match="returned none before: return one from the first step"):
        run_ranks(fit, stages, "Weighted", stages, {1})


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_a_weight_on_one_replica_alone(stages: int, virtual: int) -> None:
    with pytest.raises(RankError, match="a weight on some replicas and none on others"):
        run_ranks(fit, 2 * stages, "OnOneReplica", stages, set(), virtual, 2)
