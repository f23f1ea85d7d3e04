"""A run goes on from its checkpoint, whatever ended it and whoever goes on."""

from __future__ import annotations

import copy
import errno
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.checkpoint_io import WholeFileIO
from tests import models
from tests.ranks import RankError, run_ranks, start_ranks
from tests.training import train, trainer

EPOCHS = 3


class StatefulLoader(DataLoader[Any]):
    """Goes on after the batch it had come to."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for n, batch in enumerate(super().__iter__()):
            if n >= self.read:
                self.read = n + 1
                yield batch
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Long(models.Shared):
    """Shared weights, a schedule, and sixteen batches an epoch of a loader that keeps its place."""

    replicas = 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        x, y = torch.randn(2, 128, models.WIDTH, generator=generator, dtype=torch.float64)
        data = TensorDataset(x, y)
        if self.replicas == 1:
            return StatefulLoader(data, batch_size=8)
        # every replica has its share of each batch, so that the gradients are the same
        sampler = DistributedSampler(data, shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return StatefulLoader(data, batch_size=8 // self.replicas, sampler=sampler)


class Killed(L.Callback):
    """Dies without a word."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.global_rank == self.rank and run.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(state: dict[str, Tensor], folder: Path, every: int, step: int) -> None:
    module = Long()
    module.load_state_dict(state)
    saving = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    train(
        module,
        devices=2,
        max_epochs=EPOCHS,
        strategy=GPipeStrategy(4),
        callbacks=[saving, Killed(1, step)],
        enable_checkpointing=True,
    )


def resumed(path: Path, stages: int, replicas: int) -> dict[str, Tensor]:
    module = Long()
    module.replicas = replicas
    strategy: Any = GPipeStrategy(4, stages=stages) if stages else "auto"
    devices = max(stages, 1) * replicas
    trainer(devices=devices, max_epochs=EPOCHS, strategy=strategy).fit(module, ckpt_path=path)
    return module.state_dict()


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Long()
    initial = copy.deepcopy(module.state_dict())
    return initial, train(module, devices=1, max_epochs=EPOCHS)


@pytest.fixture(scope="module", params=["epoch end", "mid-epoch"])
def checkpoint(request: Any, uninterrupted: Any, tmp_path_factory: Any) -> Path:
    """The last checkpoint of a run that was killed."""
    every = {"epoch end": 16, "mid-epoch": 10}[request.param]
    folder: Path = tmp_path_factory.mktemp("killed")
    for process in start_ranks(killed, 2, folder, uninterrupted[0], folder, every, 25):
        process.join(60)
        assert process.exitcode != 0
    last = {16: "step=16.ckpt", 10: "step=20.ckpt"}[every]
    assert sorted(path.name for path in folder.glob("*.ckpt"))[-1] == last
    assert not list(folder.glob("*.tmp"))
    return folder / last


@pytest.mark.parametrize(("stages", "replicas"), [(3, 1), (1, 1), (2, 1), (2, 2), (1, 2), (0, 1)])
def test_a_killed_run_goes_on(
    checkpoint: Path, uninterrupted: Any, stages: int, replicas: int
) -> None:
    world = max(stages, 1) * replicas
    state = run_ranks(resumed, world, checkpoint, stages, replicas)[0]
    torch.testing.assert_close(state, uninterrupted[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("every", [16, 10])
def test_a_plain_trainers_checkpoint_goes_on(
    every: int, uninterrupted: Any, tmp_path: Path
) -> None:
    module = Long()
    module.load_state_dict(uninterrupted[0])
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=every, filename="saved")
    train(module, devices=1, max_steps=20, callbacks=[saving], enable_checkpointing=True)
    state = run_ranks(resumed, 2, tmp_path / "saved.ckpt", 2, 1)[0]
    torch.testing.assert_close(state, uninterrupted[1], rtol=0, atol=1e-10)


# ---------------------------------------------------------------------- what is in a file


class OfFive(Long):
    samples = 5


def save_and_resume(
    folder: Path, chunks: Any, resumed_chunks: Any, kind: type[models.Module] = Long
) -> list[str]:
    """Train and resume; returns the warnings."""
    import warnings

    if chunks is not None:
        run = trainer(devices=2, max_steps=1, strategy=GPipeStrategy(chunks, balance=[2, 4]))
        run.fit(kind())
        run.save_checkpoint(folder / "saved.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(devices=2, max_steps=2, strategy=GPipeStrategy(resumed_chunks))
        run.fit(kind(), ckpt_path=folder / "saved.ckpt")
    return [str(w.message) for w in caught if "micro-batches a mini-batch" in str(w.message)]


def test_a_changed_number_of_micro_batches_is_warned_of(tmp_path: Path) -> None:
    assert run_ranks(save_and_resume, 2, tmp_path, 4, 4) == [[], []]
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["lightning_gpipe"]
    assert saved == {"chunks": 4, "stages": 2, "replicas": 1, "partition": [2, 4]}
    first, second = run_ranks(save_and_resume, 2, tmp_path, None, "auto")
    assert "trained with 4 micro-batches" in first[0]
    assert "this run has 8" in first[0]
    assert second == []
    few = run_ranks(save_and_resume, 2, tmp_path, "auto", "auto", OfFive)
    assert few == [[], []], "both runs chose 5"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("truncated", "can't be read .* resume from an earlier one"),
        ("without its end", "can't be read .* resume from an earlier one"),
        ("empty", "can't be read"),
        ("text", "can't be read"),
        ("weights", "has no 'state_dict'"),
        ("list", "has no 'state_dict'"),
        ("number", "has no 'state_dict'"),
    ],
)
def test_a_bad_file_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    run = trainer(devices=1, max_steps=1)
    run.fit(Long())
    run.save_checkpoint(path)
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:2000])
    elif content == "without its end":
        path.write_bytes(path.read_bytes()[:-3])
    elif content == "empty":
        path.write_bytes(b"")
    elif content == "text":
        path.write_text("not a checkpoint")
    elif content == "weights":
        torch.save(Long().state_dict(), path)
    else:
        torch.save([1, 2] if content == "list" else {"state_dict": 3}, path)
    before = path.read_bytes()
    with pytest.raises(RankError, match=problem):
        run_ranks(resumed, 2, path, 2, 1)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["saved.ckpt"], "nothing else was written"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WholeFileIO, "save_checkpoint", breaks)
    run = trainer(devices=1, max_steps=1, strategy=GPipeStrategy(2))
    run.fit(Long())
    with pytest.raises(OSError, match=r"No space left on device: '.*saved\.ckpt'"):
        run.save_checkpoint(tmp_path / "saved.ckpt")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved.ckpt"
    plugin = WholeFileIO()
    plugin.save_checkpoint({"state_dict": 1}, path)

    def breaks(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).write_bytes(b"half of")
        raise OSError("no space left")

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", breaks)
    with pytest.raises(OSError, match="no space left"):
        plugin.save_checkpoint({"state_dict": 2}, path)
    assert plugin.load_checkpoint(path) == {"state_dict": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["saved.ckpt"]


def test_a_checkpoint_is_read_before_a_run(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, path := tmp_path / "saved.ckpt")
    run = trainer(devices=1, strategy=GPipeStrategy(2))
    assert run.strategy.load_checkpoint(path) == {"state_dict": {}}


def save_in_the_background(folder: Path) -> str:
    plugin = AsyncCheckpointIO()
    run = trainer(
        devices=2,
        max_steps=1,
        strategy=GPipeStrategy(2),
        plugins=[plugin],
    )
    run.fit(Long())
    run.save_checkpoint(folder / "saved.ckpt")
    run.strategy.checkpoint_io.teardown()
    return type(plugin.checkpoint_io).__name__


class Slow(AsyncCheckpointIO):
    """Takes its time, and notes which files there are when one is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        assert self._executor is not None
        self._executor.submit(time.sleep, 0.2)  # what follows waits

    def remove_checkpoint(self, path: Any) -> None:
        self.left.append(len(list(Path(path).parent.glob("*.ckpt"))))
        super().remove_checkpoint(path)


def replace_in_the_background(folder: Path) -> list[int]:
    plugin = Slow()
    run = trainer(
        devices=2,
        max_epochs=3,
        strategy=GPipeStrategy(2),
        plugins=[plugin],
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_top_k=1, every_n_epochs=1)],
    )
    run.fit(Long())
    return plugin.left


def test_a_file_stays_until_the_one_that_replaces_it_is_written(tmp_path: Path) -> None:
    left = run_ranks(replace_in_the_background, 2, tmp_path)[0]
    assert set(left) == {2}, "old and new, when the old one goes"
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_what_a_killed_process_has_left_goes_with_the_next_save(tmp_path: Path) -> None:
    target, host = tmp_path / "saved.ckpt", platform.node()
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = [tmp_path / f"saved.ckpt.{host}-{ended.pid}.tmp"]
    kept = [
        tmp_path / f"saved.ckpt.{host}-{os.getppid()}.tmp",  # still running
        tmp_path / f"saved.ckpt.another-{ended.pid}.tmp",  # who knows
        tmp_path / f"other.ckpt.{host}-{ended.pid}.tmp",
        tmp_path / "saved.ckpt.tmp",
    ]
    for path in (*gone, *kept):
        path.write_bytes(b"")
    WholeFileIO().save_checkpoint({"state_dict": {}}, target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *kept])


def test_saving_in_the_background(tmp_path: Path) -> None:
    assert run_ranks(save_in_the_background, 2, tmp_path) == ["WholeFileIO"] * 2
    assert "state_dict" in torch.load(tmp_path / "saved.ckpt", weights_only=True)
