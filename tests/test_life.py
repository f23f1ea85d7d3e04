"""The life cycle: one module through several runs, Trainers and numbers of stages."""

from __future__ import annotations

import copy
import gc
import glob
import pickle
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.messages import RemoteError
from tests import models
from tests.ranks import RankError, run_ranks, start_ranks
from tests.training import trainer


class Living(models.Around):
    """Has every step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(*batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


#: What is run, on how many stages; with another number, or "new", by a new Trainer.
TRANSITIONS: dict[str, list[Any]] = {
    "fit, test": ["fit", "test"],
    "fit, validate, fit": ["fit", "validate", "fit"],
    "fit, test, fit, predict": ["fit", "test", "fit", "predict"],
    "validate, fit": ["validate", "fit"],
    "test, predict": ["test", "predict"],
    "predict, fit, predict": ["predict", "fit", "predict"],
    "fit, fit by a second Trainer": ["fit", "new", "fit"],
    "fit, predict by a second Trainer": ["fit", "new", "predict"],
    "fit on 4, fit on 2 x 2": ["fit", 2, "fit"],
    "fit on 4, fit on 1 x 4, fit on 4": ["fit", 1, "fit", 4, "fit"],
    "fit on 2 x 2, fit on 4, test": [2, "fit", 4, "fit", "test"],
    "validate on 2 x 2, fit on 4": [2, "validate", 4, "fit"],
}


def live(script: list[Any], state: dict[str, Tensor], pipeline: bool) -> Any:
    """Run a script; returns all results, and the module's state."""
    module = Living()
    module.load_state_dict(state)
    results: list[Any] = []
    stages, epochs, run = 4, 0, None
    for word in script:
        if not isinstance(word, str) or word == "new":
            stages, run = (stages if word == "new" else word), None
            continue
        if run is None:
            epochs = 0
            strategy: Any = GPipeStrategy(3, stages=stages) if pipeline else "auto"
            run = trainer(
                devices=4 if pipeline else 1,
                strategy=strategy,
                use_distributed_sampler=False,  # replicas see the same: equal to one
                num_sanity_val_steps=1,
                limit_train_batches=5,
                limit_val_batches=3,
                limit_test_batches=3,
                limit_predict_batches=3,
            )
        if word == "fit":
            epochs += 1
            run.fit_loop.max_epochs = epochs
            run.fit(module)
            results.append(dict(run.callback_metrics))
        else:
            verbose = {} if word == "predict" else {"verbose": False}
            results.append(getattr(run, word)(module, **verbose))
    whole = not pipeline or dist.get_rank() == 0
    if whole:
        assert {p.device.type for p in module.parameters()} == {"cpu"}
        results.append(module(torch.ones(2, models.WIDTH, dtype=torch.float64)).detach())
        copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        for other in copies:
            torch.testing.assert_close(other.state_dict(), module.state_dict())
    assert "forward" not in module.backbone.__dict__ or not whole
    return results, module.state_dict()


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition(name: str) -> None:
    torch.manual_seed(0)
    state = Living().state_dict()
    expected = run_ranks(live, 1, TRANSITIONS[name], state, False)[0]
    ranks = run_ranks(live, 4, TRANSITIONS[name], state, True)
    torch.testing.assert_close(ranks[0], expected, rtol=0, atol=1e-10)
    for results, _ in ranks[1:]:
        torch.testing.assert_close(results, expected[0][: len(results)], rtol=0, atol=1e-10)


class Breaks(L.Callback):
    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        raise OSError("the disk is full")


def after_an_exception(folder: str) -> tuple[list[str], dict[str, Tensor]]:
    """Fail on every rank, then use the module, then another."""
    torch.manual_seed(0)
    module = Living()
    run = trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3))
    run.fit(module)
    run.save_checkpoint(f"{folder}/saved.ckpt")
    said = []
    failing = trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3), callbacks=[Breaks()])
    for attempt in (failing, trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3))):
        try:
            attempt.fit(module)
        except Exception as error:
            said.append(str(error))
    try:
        module(torch.ones(2, models.WIDTH, dtype=torch.float64))
    except Exception as error:
        said.append(str(error))
    again = trainer(devices=2, max_epochs=2, strategy=GPipeStrategy(3))
    again.fit(module, ckpt_path=f"{folder}/saved.ckpt")
    return said, module.state_dict()


def test_after_an_exception(tmp_path: Any) -> None:
    ranks = run_ranks(after_an_exception, 2, str(tmp_path))
    for said, _ in ranks:
        assert "the disk is full" in said[0]
        assert "an earlier run was interrupted" in said[1]
        assert "After a run that an error has ended, build the module anew" in said[2]
    torch.manual_seed(0)
    module = Living()
    trainer(devices=1, max_epochs=2).fit(module)
    torch.testing.assert_close(ranks[0][1], module.state_dict(), rtol=0, atol=1e-10)


def on_meta() -> list[tuple[bool, bool]]:
    """A rank that has no memory for the module to begin with has none at the end."""
    module, found = Living(), []
    if dist.get_rank():
        module.backbone.to("meta")
    for _ in range(2):
        trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3)).fit(module)
        tensors = list(module.backbone.parameters())
        found.append((all(p.is_meta for p in tensors), any(p.is_meta for p in tensors)))
    return found


def test_a_rank_without_the_module_stays_without() -> None:
    first, second = run_ranks(on_meta, 2)
    assert first == [(False, False)] * 2
    assert second == [(True, True)] * 2


class Pruned(Exception):
    pass


class Prunes(Living):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            raise Pruned("no better than the others")
        return loss


def caught_by_its_type() -> int:
    strategy = GPipeStrategy(3)
    with pytest.raises(Pruned, match="no better"):
        trainer(devices=2, max_epochs=1, strategy=strategy).fit(Prunes())
    second = trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3))
    second.fit(Living())
    return second.global_step


def test_an_error_that_each_rank_raises_is_caught_by_its_type() -> None:
    for _ in range(3):  # which of them is first is chance
        assert run_ranks(caught_by_its_type, 2) == [15, 15]


class Forgets(Living):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


def forgetting() -> None:
    strategy = GPipeStrategy(3)
    trainer(devices=2, max_epochs=1, strategy=strategy, accumulate_grad_batches=2).fit(Forgets())


def test_a_forgotten_return_is_told() -> None:
    with pytest.raises(RankError, match="training_step returned None: is `return loss` missing"):
        run_ranks(forgetting, 2)


class Skips(Living):
    """Skips batches whose loss is no number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        loss = loss * float("nan") if batch_idx in (0, 3, 4, 14) else loss
        return loss if loss.isfinite() else None


def skipped(stages: int, clip: float | None) -> tuple[dict[str, Tensor], Any]:
    """What a run comes to that skips batches, with as many stages; 0: a plain Trainer."""
    strategy = GPipeStrategy(3) if stages else "auto"
    run = trainer(
        devices=stages or 1, max_epochs=2, strategy=strategy, gradient_clip_val=clip, max_steps=-1
    )
    torch.manual_seed(0)
    module = Skips()
    run.fit(module)
    return module.state_dict(), (run.global_step, run.callback_metrics["val_loss"])


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_batch_is_skipped_as_in_a_plain_trainer(clip: float | None) -> None:
    plain = skipped(0, clip)
    for stages in (2, 3):
        torch.testing.assert_close(run_ranks(skipped, stages, stages, clip)[0], plain)


class SkipsOnOne(Living):
    def __init__(self, rank: int, index: int) -> None:
        super().__init__()
        self.rank, self.index = rank, index

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == self.index and self.global_rank == self.rank else loss


def skipping_on_one(rank: int, index: int) -> None:
    trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3)).fit(SkipsOnOne(rank, index))


@pytest.mark.parametrize(("rank", "index"), [(0, 1), (0, 3), (1, 1), (1, 3)])
def test_a_batch_that_one_rank_alone_skips_is_refused(rank: int, index: int) -> None:
    with pytest.raises(RankError, match="returned None on some stages and a loss on others"):
        run_ranks(skipping_on_one, 2, rank, index)


class Pairs(Living):
    """Reads two batches in a step; the loader has 15."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        first, second = next(dataloader_iter)[0], next(dataloader_iter)[0]
        return self.loss(*map(torch.cat, zip(first, second, strict=True)))

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        first, second = next(dataloader_iter)[0], next(dataloader_iter)[0]
        loss = self.loss(*map(torch.cat, zip(first, second, strict=True)))
        self.log("val_loss", loss, batch_size=16)


def reading_pairs(stages: int) -> tuple[int, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Pairs()
    options = {"strategy": GPipeStrategy(3)} if stages else {}
    run = trainer(devices=stages or 1, max_epochs=2, **options)
    run.fit(module)
    return run.global_step, dict(run.callback_metrics), module.state_dict()


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_finds_no_batch_ends_the_epoch() -> None:
    plain = reading_pairs(0)
    assert plain[0] == 14
    for found in run_ranks(reading_pairs, 2, 2):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


class Unended(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.parameters())  # there are none


def ending_in_a_layer() -> str:
    module = Living()
    module.backbone.append(Unended())
    with pytest.raises(RuntimeError) as caught:
        trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3, balance=[3, 4])).fit(module)
    return str(caught.value)


def test_a_layer_cannot_end_the_epoch() -> None:
    for said in run_ranks(ending_in_a_layer, 2):
        assert "StopIteration" in said


class Unsavable(torch.optim.SGD):
    def state_dict(self) -> Any:
        raise KeyError("state")


class Trained(Living):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = Unsavable if self.optimizer == "unsavable" else torch.optim.SGD
        return kind(self.parameters(), lr=0.1)


def failing_at_the_end() -> tuple[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    module, said = Trained("unsavable"), ""
    try:
        trainer(devices=2, max_epochs=1, strategy=GPipeStrategy(3)).fit(module)
    except (KeyError, RemoteError) as error:  # of this rank, or of the one that failed first
        said = str(error)
    return said, module.state_dict()


def test_an_error_in_the_teardown_leaves_the_trained_weights() -> None:
    torch.manual_seed(0)
    module = Trained()
    trainer(devices=1, max_epochs=1).fit(module)
    for said, state in run_ranks(failing_at_the_end, 2):
        assert "state" in said
        torch.testing.assert_close(state, module.state_dict(), rtol=0, atol=1e-10)


def save_on_exception(folder: str) -> tuple[str, list[str]]:
    saving = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=1000)
    run = trainer(
        devices=2,
        max_epochs=1,
        strategy=GPipeStrategy(3),
        enable_checkpointing=True,
        callbacks=[saving, Breaks()],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match="the disk is full"):
            run.fit(Living())
    return f"{saving._last_checkpoint_saved}{saving.last_model_path}", [
        str(warning.message) for warning in caught
    ]


def test_no_file_is_named_that_was_not_saved_after_an_exception(tmp_path: Path) -> None:
    named, texts = run_ranks(save_on_exception, 2, str(tmp_path))[0]
    assert named == ""
    assert any("at the exception is not saved, because the run has failed" in t for t in texts)
    assert list(tmp_path.iterdir()) == []


def threads_after_runs(stages: int, step: Any) -> None:
    """Print the names of gloo's threads after each of three runs, when no garbage is collected."""
    gc.collect()
    gc.disable()
    for _ in range(3):
        strategy = GPipeStrategy(2, stages=stages, step=step)
        trainer(devices=2, strategy=strategy, max_steps=1).fit(Living())
        names = []
        for path in glob.glob("/proc/self/task/*/comm"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                names.append(Path(path).read_text().strip())
        print("threads:", *sorted(name for name in names if "gloo" in name))


@pytest.mark.parametrize("step", ["mini-batch", "micro-batch"])
def test_a_run_on_one_device_leaves_no_group(step: Any) -> None:
    """Its sockets and threads would wait for Python's collector."""
    gc.collect()
    gc.disable()
    before = groups_that_live()  # of a module that keeps its loss, as other tests have one
    try:
        run = trainer(strategy=GPipeStrategy(2, step=step), max_steps=1)
        run.fit(Living())
        left = [found for found in groups_that_live() if all(found is not old for old in before)]
    finally:
        gc.enable()
    assert left == []


def groups_that_live() -> list[Groups]:
    return [found for found in gc.get_objects() if type(found) is Groups]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
@pytest.mark.parametrize(
    ("stages", "step"), [(1, "mini-batch"), (2, "mini-batch"), (2, "micro-batch")]
)
def test_a_run_leaves_no_thread(stages: int, step: str, tmp_path: Path) -> None:
    """Those of its process groups would wake up all the time."""
    for process in start_ranks(threads_after_runs, 2, tmp_path, stages, step):
        process.join(150)
    for rank in range(2):
        screen = (tmp_path / str(rank)).read_text()
        found = re.findall("^threads:.*$", screen, re.MULTILINE)
        assert len(found) == 3, screen
        assert len(set(found)) == 1, found
