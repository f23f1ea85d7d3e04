"""What people do with the Trainer and the module during and after a run, whatever K is."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gpipe import GPipeStrategy
from tests import models
from tests.ranks import run_ranks
from tests.training import train, trainer


class Copies(L.Callback):
    """Copies the Trainer at the beginning of a run, and the callbacks in the middle."""

    def on_fit_start(self, run: L.Trainer, *_: Any) -> None:
        assert copy.deepcopy(run).strategy is run.strategy  # some callbacks keep the Trainer

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        callbacks = copy.deepcopy(run.callbacks)
        self.copied = [type(callback) for callback in callbacks]
        self.keys = [
            [*callback._average_model.state_dict()]
            for callback in callbacks
            if getattr(callback, "_average_model", None) is not None
        ]


def objects(stages: int) -> None:
    copies = Copies()
    averaging = [StochasticWeightAveraging(1e-2, 1), EMAWeightAveraging()]
    run = trainer(
        devices=stages,
        strategy=GPipeStrategy(2),
        max_epochs=2,
        limit_train_batches=1,
        callbacks=[
            copies,
            ModelSummary(),
            EarlyStopping("loss"),
            *averaging,
        ],
    )
    assert copy.deepcopy(run).strategy is not run.strategy
    run.fit(models.Module())
    assert Copies in copies.copied
    assert EarlyStopping in copies.copied
    names = {*models.Module().state_dict()}
    by_swa, by_ema = map(set, copies.keys)
    assert by_swa == names
    assert by_ema == {"n_averaged", *(f"module.{name}" for name in names)}
    run.callbacks = [c for c in run.callbacks if not isinstance(c, EMAWeightAveraging)]  # can't
    again = pickle.loads(pickle.dumps(run))
    assert again.global_step == 2
    assert again.strategy.partition.sizes == run.strategy.partition.sizes


@pytest.mark.parametrize("stages", [1, 2])
def test_callbacks_are_copied_in_a_hook_and_the_trainer_pickles(stages: int) -> None:
    run_ranks(objects, stages, stages)


class Finds(models.Module):
    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def averaged(stages: int, averaging: type[L.Callback], **options: Any) -> tuple[list[str], Any]:
    """What is warned of where a checkpoint of averages is loaded; the weights at the end."""
    strategy = {"devices": stages, "strategy": GPipeStrategy(2)} if stages else {}
    callbacks = [LearningRateFinder(num_training_steps=4), averaging(**options)]
    torch.manual_seed(6)
    module = Finds()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(max_epochs=2, callbacks=callbacks, **strategy).fit(module)
    return [text for each in found if "meta" in (text := str(each.message))], module.state_dict()


@pytest.mark.parametrize(
    ("averaging", "options"),
    [(StochasticWeightAveraging, {"swa_lrs": 1e-2}), (EMAWeightAveraging, {"decay": 0.5})],
)
def test_averages_are_restored_without_a_warning(averaging: Any, options: Any) -> None:
    _, expected = averaged(0, averaging, **options)
    for texts, weights in run_ranks(partial(averaged, **options), 2, 2, averaging):
        assert texts == []
        torch.testing.assert_close(weights, expected)


class Hyper(models.Module):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


def points(stages: int, kind: type[models.Module], folder: str) -> int:
    """How many points of TensorBoard's hp_metric a run writes."""
    logger = TensorBoardLogger(folder, "", "")
    run = trainer(devices=stages, strategy=GPipeStrategy(2), max_steps=1, logger=logger)
    run.fit(kind())
    run.test(kind(), kind().train_dataloader(), verbose=False)
    events = EventAccumulator(folder).Reload()
    if run.is_global_zero:
        assert logger.hparams["gpipe"]["stages"] == stages
    return len(events.Scalars("hp_metric")) if "hp_metric" in events.Tags()["scalars"] else 0


class WithTest(models.Module):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)


class HyperWithTest(Hyper, WithTest):
    pass


@pytest.mark.parametrize(("kind", "expected"), [(WithTest, 0), (HyperWithTest, 2)])
def test_no_point_of_hp_metric_but_lightnings_own(
    kind: type[models.Module], expected: int, tmp_path: Path
) -> None:
    assert run_ranks(points, 2, 2, kind, str(tmp_path))[0] == expected


class Warned(models.Module):
    """Earns two of Lightning's warnings."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("an int, not sync_dist=True", torch.tensor(1), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), on_epoch=True)

    val_dataloader = models.Module.train_dataloader


def warned(stages: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(devices=stages, strategy=GPipeStrategy(2), max_steps=1).fit(Warned())
    return [str(warning.message) for warning in caught]


def test_lightnings_warnings_arrive_but_that_of_sync_dist() -> None:
    texts = run_ranks(warned, 2, 2)[0]
    assert any("You called `self.log('an int" in text for text in texts)
    assert not any("when logging on epoch level in distributed" in text for text in texts)


class Terminates(L.Callback):
    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def terminated(stages: int) -> tuple[str, bool]:
    run = trainer(devices=stages, strategy=GPipeStrategy(2), max_epochs=1, callbacks=[Terminates()])
    said = ""
    try:
        run.fit(models.Module())
    except BaseException as error:
        said = type(error).__name__
    return said, run.received_sigterm


@pytest.mark.parametrize("stages", [1, 2])
def test_received_sigterm_is_set(stages: int) -> None:
    for said, received in run_ranks(terminated, stages, stages):
        assert (said, received) == ("SIGTERMException", True)


class Counts(models.Module):
    """Reads the number of devices, as a learning rate for them does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3 * self.trainer.world_size)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        assert 8 // self.trainer.world_size
        return models.Module().train_dataloader()


def counted(kind: type[models.Module], data: Any, stages: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(devices=stages, strategy=GPipeStrategy(2), max_steps=1)
        run.fit(kind(), datamodule=data)
    return sum("is meant to use trainer.strategy.replicas (1)" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("kind", "data", "stages", "expected"),
    [
        (Counts, None, 2, 1),
        (models.Module, Data(), 2, 1),
        (models.Module, None, 2, 0),
        (Counts, None, 1, 0),
    ],
)
def test_world_size_in_a_module_or_datamodule_is_warned_of_once(
    kind: type[models.Module], data: Any, stages: int, expected: int
) -> None:
    assert run_ranks(counted, stages, kind, data, stages)[0] == expected


class DrawsOnOneRank(L.Callback):
    """Draws random numbers where ranks differ: before steps, between them, and in validation."""

    def draw(self, run: L.Trainer) -> None:
        if run.is_global_zero:
            torch.rand(3)

    def on_train_batch_start(self, run: L.Trainer, *_: Any) -> None:
        self.draw(run)

    on_train_batch_end = on_validation_batch_start = on_validation_end = on_train_batch_start


class Noisy(models.Module):
    """Adds noise in every step."""

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x + 0.1 * torch.rand_like(x), y + torch.rand(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    val_dataloader = models.Module.train_dataloader


def drawn(stages: int, is_pipeline: bool) -> Any:
    L.seed_everything(3, verbose=False)
    module = Noisy()
    strategy: Any = GPipeStrategy(2) if is_pipeline else "auto"
    run = trainer(devices=stages, strategy=strategy, max_epochs=2, callbacks=[DrawsOnOneRank()])
    run.fit(module)
    return module.state_dict(), run.callback_metrics


def test_random_numbers_of_a_rank_zero_callback_are_those_of_one_device() -> None:
    plain = run_ranks(drawn, 1, 1, False)[0]
    for found in run_ranks(drawn, 2, 2, True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and doesn't call its class's constructor, as published ones don't."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.slow, self.steps = inner, dict[Any, torch.Tensor](), 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss, self.steps = self.inner.step(closure), self.steps + 1
        for group in self.param_groups if self.steps % 3 == 0 else ():
            for p in group["params"]:
                slow = self.slow.setdefault(p, p.detach().clone())
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class LooksAhead(models.Module):
    def configure_optimizers(self) -> Any:
        return Lookahead(super().configure_optimizers())


class LooksAheadWithDicts(models.Module):
    """Its optimizer has hooks, in dicts that can't be referred to weakly, as PyTorch's can."""

    def configure_optimizers(self) -> Any:
        optimizer = Lookahead(super().configure_optimizers())
        vars(optimizer).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        return optimizer


def looking_ahead(kind: type[models.Module], stages: int) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"devices": stages, "strategy": GPipeStrategy(2)} if stages else {}
    torch.manual_seed(0)
    return train(kind(), max_steps=8, **options)


@pytest.mark.parametrize(
    ("kind", "stages"), [(LooksAhead, 1), (LooksAhead, 2), (LooksAheadWithDicts, 2)]
)
def test_an_optimizer_that_has_not_called_its_constructor(
    kind: type[models.Module], stages: int
) -> None:
    found = run_ranks(looking_ahead, stages, kind, stages)[0]
    torch.testing.assert_close(found, looking_ahead(kind, 0))
