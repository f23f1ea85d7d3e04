"""What the process that has started others for a run has of it afterwards."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_gpipe import GPipeStrategy, PipelineMonitor
from tests.models import Around
from tests.training import trainer

METRICS = 400  # more than a pipe between processes takes


class Tied(Around):
    """In single precision, with a weight in two places, an unsaved buffer and a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.again = self.after
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def configure_callbacks(self) -> Any:
        is_cut = isinstance(self.trainer.strategy, GPipeStrategy)
        return [PipelineMonitor(table=False)] if is_cut else []

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"metric {i}": float(i) for i in range(METRICS)})

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1 / 3

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0])


def forking(**options: Any) -> Any:
    strategy = GPipeStrategy(3, start_method="fork")
    return trainer(devices=2, strategy=strategy, max_epochs=2, **options)


def types(_: str) -> None:
    """Types and values are those of a plain Trainer, in the same tensors."""
    for precision in "64-true", "bf16-true":
        of_type(precision)


def of_type(precision: Any) -> None:
    runs = []
    for run in (
        trainer(devices=1, max_epochs=2, limit_train_batches=3, precision=precision),
        forking(limit_train_batches=3, precision=precision),
    ):
        torch.manual_seed(5)
        module = Tied()
        before = [*map(id, module.parameters())]
        run.fit(module)
        assert [*map(id, module.parameters())] == before
        assert module.again.weight is module.after.weight
        tensors = {**module.state_dict(), "seen": module.seen}
        progress = run.global_step, run.current_epoch, len(run.callback_metrics)
        runs.append((tensors, progress, module.dtype))
    near = 1e-2 if precision == "bf16-true" else 1e-10
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=0, atol=near)
    assert runs[1][1:] == runs[0][1:]
    assert runs[1][1][0] > 0


def saving(folder: str) -> None:
    """A checkpoint without the optimizers' state is refused, one of the weights is written."""
    module, run = Around(), forking()
    run.fit(module)
    full, weights = Path(folder, "full.ckpt"), Path(folder, "weights.ckpt")
    with pytest.raises(RuntimeError, match=r"optimizers' state.*weights_only=True"):
        run.save_checkpoint(full)
    assert not full.exists()
    with pytest.raises(NotImplementedError, match="new Trainer"):
        run.fit(module)
    run.save_checkpoint(weights, weights_only=True)
    saved = torch.load(weights, weights_only=True)
    assert saved["global_step"] == run.global_step > 0
    torch.testing.assert_close(saved["state_dict"], module.state_dict(), rtol=0, atol=0)


class Left:
    """Something in a cycle, as groups of an earlier run may be, that ends when it is collected."""

    has_ended = False

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Left.has_ended = True


class LetsGo(Callback):
    """Lets go of what the process had that has forked this one: its threads aren't here."""

    def __init__(self) -> None:
        self.left: Left | None = Left()

    def on_train_start(self, *_: Any) -> None:
        self.left = None
        gc.collect()
        assert not Left.has_ended


def tuning(_: str) -> None:
    """A Tuner is refused before processes start, and the Trainer can train after that."""
    module, run = Around(), forking(callbacks=[LetsGo()])
    with pytest.raises(ValueError, match=r"LearningRateFinder\(\)"):
        Tuner(run).lr_find(module)
    run.fit(module)
    assert run.global_step > 0


def predicting(_: str) -> None:
    """It is said that nothing comes back; a second run's error is its own."""
    module, run = Tied().double(), forking()
    with pytest.warns(UserWarning, match="predict returns None"):
        assert run.predict(module, module.train_dataloader()) is None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="predict returns None")
        run.predict(module, module.train_dataloader(), return_predictions=False)
    with pytest.raises(Exception, match="No `test_step") as caught:
        run.test(module, module.train_dataloader())
    assert "can only test a child process" not in str(caught.value)


class Draws(Around):
    """Draws in its step, and collects what is left of runs before."""

    def on_fit_start(self) -> None:
        gc.collect()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        drawn = {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(())}
        self.log_dict(drawn)
        return super().training_step(batch, batch_idx)


def drawing(_: str) -> None:
    """After a run of one stage in this process, generators are as in a plain Trainer's run."""
    found = []
    one_stage = trainer(devices=1, strategy=GPipeStrategy(3), max_epochs=2)
    plain = trainer(devices=1, max_epochs=2)
    # a third run of several processes found what the first has left in the one stage's store
    for run in forking(), one_stage, plain, forking(), forking():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        run.fit(Draws())
        found.append({name: float(run.callback_metrics[name]) for name in RANDOM})
    assert all(numbers == found[0] for numbers in found)


class Makes(nn.Module):
    """Makes buffers when it is called first, and gives one another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("shape", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        if self.mean is None:
            self.mean = x.detach().mean(0)
            self.register_buffer("late", self.mean + 1)
            self.register_buffer("unsaved", self.mean + 2, persistent=False)
            self.shape = torch.ones(5)
        return x - self.mean


class Centres(Around):
    """Layers of both stages make buffers."""

    def build(self) -> None:
        super().build()
        first, *others = self.backbone
        self.backbone = nn.Sequential(Makes(), first, *others, Makes())

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def making(start_method: Any, folder: str) -> None:
    """Buffers that layers make come back, and are saved in the run and after it."""
    found, saved = [], Path(folder, "saved.ckpt")
    strategy = GPipeStrategy(1, start_method=start_method)
    for options in {"devices": 1}, {"devices": 2, "strategy": strategy}:
        torch.manual_seed(3)
        module, run = Centres(), trainer(max_epochs=2, **options)
        module.path = str(saved)
        run.fit(module)
        found.append(dict(module.named_buffers()))
        if run.is_global_zero:
            keys = torch.load(saved, weights_only=True)["state_dict"].keys()
            assert keys == module.state_dict().keys()
        run.save_checkpoint(f"{saved}.after", weights_only=True)
        if run.is_global_zero:
            after = torch.load(f"{saved}.after", weights_only=True)["state_dict"]
            torch.testing.assert_close(dict(after), dict(module.state_dict()))
    assert len(found[0]) == 8
    torch.testing.assert_close(*found)


def made_by_fork(folder: str) -> None:
    """See :func:`making`."""
    making("fork", folder)


def made_by_popen(folder: str) -> None:
    """See :func:`making`."""
    making("popen", folder)


class Ends(Around):
    """Raises in a step, or is interrupted there by Ctrl-C."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2 and self.how == "raises":
            raise ArithmeticError("a step has failed")
        if self.global_step == 2 and self.global_rank == 0:
            os.kill(os.getppid(), signal.SIGINT)  # as a terminal does, which sends it to all
            os.kill(os.getpid(), signal.SIGINT)


def ending(folder: str) -> None:
    """What is saved of a run that ends early is of that run; this process's module isn't."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not so where it starts behind others
    file = Path(folder, "on_exception.ckpt")
    for how in "raises", "is interrupted":
        file.unlink(missing_ok=True)
        ended = SystemExit if how != "raises" else Exception
        run = forking(callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with pytest.raises(ended) as caught:
                run.fit(Ends(how))
        is_told = any("is not saved, because the run has failed" in str(w.message) for w in told)
        assert is_told == (how == "raises"), (how, told)
        if how == "raises":
            assert "a step has failed" in str(caught.value)
            assert not file.exists()
        else:
            assert torch.load(file, weights_only=False)["global_step"] >= 2
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has switched it off


RANDOM = "python", "numpy", "torch"
RUNS = types, saving, tuning, predicting, drawing, made_by_fork, made_by_popen, ending

if __name__ == "__main__":
    {each.__name__: each for each in RUNS}[sys.argv[1]](sys.argv[2])
