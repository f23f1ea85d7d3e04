"""Every hook of the LightningModule, the Callback and the DataModule: on every rank, in order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.plan.settings import StepMode
from tests.compatibility.rows import STAGES, Module
from tests.ranks import RankError, run_ranks
from tests.training import trainer

_STEPS = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "predict_step",
    "test_step",
    "training_step",
    "validation_step",
)
_ON_EXCEPTION = "on_exception"
_ON_ONE_RANK = "prepare_data"  # of a node, as with every strategy


def _methods(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def module_hooks() -> list[str]:
    """Those of the installed Lightning; a deprecated one is left out."""
    hooks = [*_methods(ModelHooks), *_methods(DataHooks), *_methods(CheckpointHooks), *_STEPS]
    return sorted({*hooks} - {"configure_sharded_model"})


def callback_hooks() -> list[str]:
    return sorted({*_methods(L.Callback)} - {"state_key"})


def data_hooks() -> list[str]:
    own = {"state_dict", "load_state_dict", _ON_EXCEPTION}
    return sorted({*_methods(DataHooks), "setup", "teardown", "prepare_data", *own})


HOOKS = {
    "LightningModule hooks": module_hooks(),
    "Callback hooks": callback_hooks(),
    "DataModule hooks": data_hooks(),
}
_trace: list[tuple[str, str]] = []


def _recording(base: type, section: str) -> Any:
    """A subclass whose hooks note that they are called."""

    def note(name: str) -> Any:
        original = getattr(base, name)

        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            _trace.append((section, name))
            return original(self, *args, **kwargs)

        hook.__dict__["__signature__"] = inspect.signature(original)
        del hook.__dict__["__wrapped__"]  # else Lightning takes it for the original
        return hook

    return type("Recording", (base,), {name: note(name) for name in HOOKS[section]})


class _Module(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class _Callback(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"some": 1}


class _Data(L.LightningDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"some": 1}

    def train_dataloader(self) -> Any:
        return Module().loader(1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _trace_of(
    with_data: bool, stages: int, folder: str, step: StepMode = "mini-batch"
) -> list[tuple[str, str]]:
    """Fit, save, go on, validate, test and predict."""
    _trace.clear()
    options: dict[str, Any] = {"strategy": GPipeStrategy(2, step=step)} if stages else {}
    data = _recording(_Data, "DataModule hooks")() if with_data else None
    module = _Module() if with_data else _recording(_Module, "LightningModule hooks")()
    callback = _recording(_Callback, "Callback hooks")()
    run = trainer(
        devices=stages or 1,
        max_epochs=1,
        limit_train_batches=2,
        callbacks=[callback],
        gradient_clip_val=1.0,
        **options,
    )
    run.fit(module, data)
    path = f"{folder}/{stages}.ckpt"
    run.save_checkpoint(path)
    run.fit_loop.max_epochs = 2
    run.fit(module, data, ckpt_path=path, weights_only=False)
    run.validate(module, data, verbose=False)
    run.test(module, data, verbose=False)
    run.predict(module, data)
    return list(_trace)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[tuple[str, str]]]]:
    """For a module and a DataModule the plain Trainer's trace, and that of each rank."""
    folder = str(tmp_path_factory.mktemp("traces"))
    return {
        "LightningModule hooks": [
            _trace_of(False, 0, folder),
            *run_ranks(_trace_of, STAGES, False, STAGES, folder),
        ],
        "DataModule hooks": [
            _trace_of(True, 0, folder),
            *run_ranks(_trace_of, STAGES, True, STAGES, folder),
        ],
    }


ROWS = [(section, name) for section, names in HOOKS.items() for name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("section", "name"), ROWS)
def test_row(section: str, name: str, traces: Any, tmp_path: Path) -> None:
    if name == _ON_EXCEPTION:
        _check_exception(section, tmp_path)
        return
    run = traces["DataModule hooks" if section == "DataModule hooks" else "LightningModule hooks"]
    plain, *ranks = ([entry for entry in trace if entry[1] != _ON_ONE_RANK] for trace in run)
    if name == _ON_ONE_RANK:
        assert [(section, name) in trace for trace in run] == [True, True, False]
        return
    places = _places(plain, (section, name))
    assert places
    for trace in ranks:
        assert _places(trace, (section, name)) == places
        assert trace == plain


def _places(trace: Iterable[tuple[str, str]], entry: tuple[str, str]) -> list[int]:
    return [i for i, other in enumerate(trace) if other == entry]


def _check_exception(section: str, folder: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(_fail, STAGES, section == "DataModule hooks", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


def _fail(with_data: bool, folder: str) -> None:
    """Fail on one rank, and note on each what the hook is told."""

    class Told:
        def on_exception(self, *args: Any) -> None:
            rank = run.global_rank
            (Path(folder) / str(rank)).write_text(str(args[-1]))

    class Callback(Told, L.Callback):
        pass

    class Data(Told, _Data):
        pass

    class Broken(_Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_rank == 1:
                raise ValueError("broken on purpose")
            return super().training_step(batch, batch_idx)

    callbacks: list[L.Callback] = [] if with_data else [Callback()]
    run = trainer(devices=STAGES, strategy=GPipeStrategy(2), max_epochs=1, callbacks=callbacks)
    run.fit(Broken(), Data() if with_data else None)


def test_hooks_around_a_step_per_micro_batch(tmp_path: Path) -> None:
    """They are called as often and in the same order; the steps are called more often."""
    first = ("DataModule hooks", "prepare_data")  # a rank of each node calls it
    plain = [called for called in _trace_of(True, 0, str(tmp_path)) if called != first]
    assert plain
    for trace in run_ranks(_trace_of, STAGES, True, STAGES, str(tmp_path), "micro-batch"):
        assert [called for called in trace if called != first] == plain
