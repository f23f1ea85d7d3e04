"""Checkpoints that are folders, to which every process writes its part."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_gpipe import GPipeStrategy, cli
from lightning_gpipe.state import gather, optimizers, replacing
from lightning_gpipe.state.parts import Part, Share, write
from lightning_gpipe.state.sharded import Folder
from lightning_gpipe.strategy.checkpoint_io import WholeFileIO, wait_for_parts
from tests import models
from tests.ranks import RankError, run_ranks, start_ranks
from tests.test_resume import EPOCHS, Long
from tests.training import trainer


class Noted(nn.Linear):
    """A layer with a buffer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(models.WIDTH, models.WIDTH)
        self.register_buffer("offset", torch.randn(models.WIDTH))
        self.note: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset

    def get_extra_state(self) -> Any:
        return {"note": {1: "one"}, "nothing": {}}

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Rich(Long):
    """Tied weights, a buffer, extra state, a frozen parameter, two groups, and hooks."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()

    def build(self) -> None:
        super().build()
        self.backbone.append(Noted())
        self.backbone.append(nn.Tanh())
        self.backbone[6].bias.requires_grad_(False)
        self.register_buffer("empty", torch.zeros(0))

    def configure_optimizers(self) -> Any:
        some = [*self.backbone[2].parameters()]
        others = [p for p in self.parameters() if not any(p is q for q in some)]
        groups = [{"params": some, "lr": 3e-3}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"numbers": [1, 2], "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["own"]["numbers"] != [1, 2]:
            raise AssertionError(checkpoint)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.loss(*batch))

    test_dataloader = models.Module.train_dataloader


def strategy(stages: int, **options: Any) -> Any:
    return GPipeStrategy(4, stages=stages, **{"save_distributed_checkpoint": True, **options})


class Saving(ModelCheckpoint):
    """Saves, if in parts then while nothing may be moved to the first stage."""

    def _save_checkpoint(self, run: Any, path: str) -> None:
        kept = gather.to_first
        if run.strategy._settings.save_distributed_checkpoint:
            gather.to_first = optimizers.to_first = _forbidden
        try:
            super()._save_checkpoint(run, path)
        finally:
            gather.to_first = optimizers.to_first = kept


def _forbidden(*_: Any) -> Any:
    raise AssertionError("gathered")


def save(state: Any, path: Path, stages: int, replicas: int = 1, **options: Any) -> list[str]:
    """Train an epoch, and save at its end."""
    module = Rich()
    module.load_state_dict(state)
    module.replicas = replicas
    run = trainer(
        devices=stages * replicas,
        max_epochs=1,
        strategy=strategy(stages, **options),
        callbacks=[Saving(path.parent, filename=path.stem, save_last=True)],
        enable_checkpointing=True,
    )
    run.fit(module)
    return sorted(p.name for p in path.parent.iterdir())


def resume(path: Path, stages: int, replicas: int, **options: Any) -> dict[str, Tensor]:
    """Go on to the end, from a folder or a file; returns the weights and the optimizer's state."""
    module = Rich()
    module.replicas = replicas
    chosen: Any = strategy(stages, **options) if stages else "auto"
    run = trainer(devices=max(stages, 1) * replicas, max_epochs=EPOCHS, strategy=chosen)
    run.fit(module, ckpt_path=path)
    if module.backbone[6].note != {"note": {1: "one"}, "nothing": {}}:
        raise AssertionError(module.backbone[6].note)
    return flat(module, run)


def flat(module: Any, run: Any) -> dict[str, Tensor]:
    states = run.optimizers[0].state_dict()["state"]
    found = {f"{i}.{k}": v for i, state in states.items() for k, v in state.items()}
    tensors = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {**found, **tensors}


@pytest.fixture(scope="module")
def initial() -> dict[str, Any]:
    torch.manual_seed(0)
    return copy.deepcopy(Rich().state_dict())


@pytest.fixture(scope="module")
def uninterrupted(initial: Any) -> dict[str, Tensor]:
    module = Rich()
    module.load_state_dict(initial)
    run = trainer(devices=1, max_epochs=EPOCHS)
    run.fit(module)
    return flat(module, run)


@pytest.fixture(scope="module")
def folder(initial: Any, tmp_path_factory: Any) -> Path:
    """What four stages have saved after an epoch."""
    path: Path = tmp_path_factory.mktemp("sharded") / "saved.ckpt"
    for names in run_ranks(save, 4, initial, path, 4):
        assert names == ["last.ckpt", "saved.ckpt"]
    return path


RESUMED = [
    (4, 1, {}),
    (2, 2, {}),
    (1, 1, {}),
    (1, 2, {}),
    (2, 1, {"virtual_stages": 2}),
    (2, 1, {"step": "micro-batch"}),
    (3, 1, {"balance": "params"}),
    (2, 1, {"save_distributed_checkpoint": False}),
]


@pytest.mark.parametrize(("stages", "replicas", "options"), RESUMED)
def test_a_run_goes_on_from_a_folder(
    folder: Path, uninterrupted: Any, stages: int, replicas: int, options: Any
) -> None:
    found = run_ranks(resume_with, stages * replicas, folder, stages, replicas, options)[0]
    torch.testing.assert_close(found, uninterrupted, rtol=0, atol=1e-10)


def resume_with(path: Path, stages: int, replicas: int, options: Any) -> dict[str, Tensor]:
    return resume(path, stages, replicas, **options)


@pytest.mark.parametrize(
    ("stages", "replicas", "options"),
    [(2, 2, {}), (1, 1, {}), (2, 1, {"step": "micro-batch", "virtual_stages": 2})],
)
def test_a_folder_of_any_run_goes_on(
    initial: Any, uninterrupted: Any, tmp_path: Path, stages: int, replicas: int, options: Any
) -> None:
    path = tmp_path / "saved.ckpt"
    run_ranks(save_with, stages * replicas, initial, path, stages, replicas, options)
    found = run_ranks(resume, 3, tmp_path / "last.ckpt", 3, 1)[0]
    torch.testing.assert_close(found, uninterrupted, rtol=0, atol=1e-10)
    metadata = Folder(path)._metadata
    written: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        size = getattr(metadata.state_dict_metadata[index.fqn], "size", ())
        values = torch.Size(size).numel()
        written[info.relative_path] = written.get(info.relative_path, 0) + values
    assert len(written) == stages * replicas
    assert max(written.values()) < 2 * min(written.values()), "replicas share the work"


def save_with(state: Any, path: Path, stages: int, replicas: int, options: Any) -> None:
    save(state, path, stages, replicas, **options)


# ---------------------------------------------------------------------- one file, and back


def _assert_same(one: Any, other: Any) -> None:
    """Bit for bit, and in the same order."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=0)
    elif isinstance(one, dict | list | tuple):
        assert len(one) == len(other)
        if isinstance(one, dict):
            assert [*one] == [*other]
            one, other = one.values(), other.values()
        for entries in zip(one, other, strict=True):
            _assert_same(*entries)
    else:
        assert one == other


def save_whole(state: Any, path: Path) -> None:
    save(state, path, 4, save_distributed_checkpoint=False)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*")
def test_a_consolidated_checkpoint_is_what_one_process_would_have_written(
    initial: Any, folder: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    run_ranks(save_whole, 4, initial, tmp_path / "whole" / "saved.ckpt")
    cli.main(["consolidate", str(folder), str(tmp_path / "one.ckpt")])
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    whole = torch.load(tmp_path / "whole" / "saved.ckpt", weights_only=True)
    assert list(one["state_dict"]) == list(whole["state_dict"])
    assert one["state_dict"]._metadata == whole["state_dict"]._metadata
    for checkpoint in (one, whole):
        (saving,) = checkpoint["callbacks"].values()
        assert saving.pop("best_model_path")
        assert saving.pop("dirpath")
        state = checkpoint["state_dict"]
        assert state["after.weight"].data_ptr() == state["backbone.2.weight"].data_ptr()
    _assert_same(one, {key: whole[key] for key in one})
    assert one.keys() == whole.keys()
    found = resume(tmp_path / "one.ckpt", 0, 1)
    torch.testing.assert_close(found, uninterrupted, rtol=0, atol=1e-10)
    cli.main(["shard", str(tmp_path / "one.ckpt"), str(tmp_path / "again.ckpt")])
    found = run_ranks(resume, 2, tmp_path / "again.ckpt", 2, 1)[0]
    torch.testing.assert_close(found, uninterrupted, rtol=0, atol=1e-10)
    cli.main(["consolidate", str(tmp_path / "again.ckpt"), str(tmp_path / "two.ckpt")])
    two = torch.load(tmp_path / "two.ckpt", weights_only=True)
    torch.testing.assert_close(two["optimizer_states"], whole["optimizer_states"], rtol=0, atol=0)


def test_pytorchs_own_command_reads_a_folder(folder: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    read = torch.load(tmp_path / "one.pt", weights_only=False)
    state = Folder(folder).checkpoint()["state_dict"].whole()
    assert read["state_dict"].pop("backbone.6._extra_state") == state.pop("backbone.6._extra_state")
    torch.testing.assert_close(read["state_dict"], dict(state), rtol=0, atol=0)
    optimizer = read["optimizer_0"]
    assert sorted(optimizer["state"]["backbone.0.bias"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert optimizer["param_groups"][0]["params"] == ["backbone.2.weight", "backbone.2.bias"]
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.999)


def test_a_rank_reads_what_it_asks_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    opened = filesystem.FileSystemReader.read_data

    def noted(self: Any, plan: Any, planner: Any) -> Any:
        read.extend(item.storage_index.fqn for item in plan.items)
        return opened(self, plan, planner)

    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", noted)
    stored = Folder(folder)
    checkpoint = stored.checkpoint()
    assert all(name.startswith("optimizer_0.param_groups") for name in read), "no tensor"
    read.clear()
    tensor = torch.full((6,), torch.nan)
    stored.load({"backbone.6.offset": tensor})
    assert read == ["state_dict.backbone.6.offset"]
    whole = checkpoint["state_dict"]["backbone.6.offset"]
    torch.testing.assert_close(tensor, whole.float(), rtol=0, atol=0)
    states = stored.optimizer(0, [3, 8, 9])
    names = stored._tree["optimizer_0"]["state"]
    assert [*states] == [i for i in (3, 8, 9) if i in states]
    assert len(names) == len([*Rich().parameters()]) - 1, "a frozen parameter has none"


# ---------------------------------------------------------------------- what goes wrong


class SavesOften(Callback):
    """Saves to one name after every step, and fails to write on one rank from a step on."""

    def __init__(self, path: Path, rank: int = -1, step: int = -1) -> None:
        self.path, self.rank, self.step = path, rank, step

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        failing = run.global_rank == self.rank and run.global_step >= self.step
        write = filesystem.FileSystemWriter.write_data
        if failing:
            wait_for_parts(run.strategy.checkpoint_io)  # what was saved before has room
            filesystem.FileSystemWriter.write_data = _full  # type: ignore[method-assign]
        try:
            run.save_checkpoint(self.path)
            if failing:
                with suppress(RuntimeError):  # the next batch will raise it
                    wait_for_parts(run.strategy.checkpoint_io)
        finally:
            filesystem.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_to_save(path: Path, plugins: list[Any]) -> None:
    trainer(
        devices=3,
        max_steps=6,
        strategy=strategy(3),
        plugins=plugins,
        callbacks=[SavesOften(path, rank=1, step=3)],
    ).fit(Rich())


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO()]])
def test_a_disk_that_is_full_on_one_rank_ends_all(plugins: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_to_save, 3, path, plugins, timeout_s=60)
    assert time.monotonic() - start < 40
    assert len(caught.value.errors) == 3
    for text in caught.value.errors.values():
        assert "rank 1 can't write its part (OSError: [Errno 28] No space left" in text, text
    assert [p.name for p in tmp_path.iterdir()] == ["saved.ckpt"], "nothing half-written is left"
    assert Folder(path).checkpoint()["global_step"] == 2


def save_in_a_loop(path: Path) -> None:
    """Save state after state, of which every value says which one it is."""
    rank = dist.get_rank()
    for number in itertools.count():
        state = {f"{k}": torch.full((100_000,), number, dtype=torch.float32) for k in range(6)}
        checkpoint = {"state_dict": state, "number": number}
        share = Share(rank == 0, frozenset(state), lambda key: int(key) % 2 == rank, ())
        write(Part(checkpoint, share, dist.group.WORLD), str(path))


def test_whenever_a_run_is_killed_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    for run in range(10):
        screens = tmp_path / f"run{run}"
        screens.mkdir()
        processes = start_ranks(save_in_a_loop, 2, screens, path)
        limit = time.monotonic() + 60
        before = path.stat().st_ino if path.exists() else None
        while time.monotonic() < limit and (not path.exists() or path.stat().st_ino == before):
            time.sleep(0.002)
        time.sleep(0.007 * run)
        for process in processes if run % 2 else processes[::-1]:
            process.kill()
            process.join(20)
        checkpoint = Folder(path).checkpoint()
        values = {key: value.unique().tolist() for key, value in checkpoint["state_dict"].items()}
        assert values == {str(key): [checkpoint["number"]] for key in range(6)}
    left = [p.name for p in tmp_path.iterdir() if p.name.endswith((".tmp", ".old"))]
    assert len(left) <= 1, "a later save removes what killed processes have left"


def test_a_folder_whose_replacement_was_cut_off_is_found(folder: Path, tmp_path: Path) -> None:
    """Where two names can't be exchanged in one step."""
    shutil.copytree(folder, tmp_path / "saved.ckpt.host-17.old")
    assert Folder(tmp_path / "saved.ckpt").checkpoint()["global_step"] == 16


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_file_and_a_folder_take_each_others_place(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(replacing, "exchange", lambda one, other: False)
    path, plain = tmp_path / "run" / "saved.ckpt", {"state_dict": {"a": torch.ones(3)}}
    torch.save(plain, tmp_path / "plain.ckpt")
    for _ in range(2):
        WholeFileIO().save_checkpoint(plain, path)
        assert path.is_file()
        for _ in range(2):
            cli.main(["shard", str(tmp_path / "plain.ckpt"), str(path), "--overwrite"])
            assert Folder(path).checkpoint()["state_dict"].whole().keys() == {"a"}
    assert [p.name for p in path.parent.iterdir()] == ["saved.ckpt"]
    WholeFileIO().remove_checkpoint(path)
    assert not list(path.parent.iterdir())


def test_what_is_no_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.ckpt"
    shutil.copytree(folder, half)
    (half / ".metadata").unlink()
    with pytest.raises(RankError, match=r"never finished .* resume from an earlier one"):
        run_ranks(resume, 1, half, 1, 1)
    other = tmp_path / "checkpoints"
    other.mkdir()
    (other / "last.ckpt").write_text("")
    with pytest.raises(RankError, match=r"no sharded checkpoint .*checkpoints/last.ckpt"):
        run_ranks(resume, 1, other, 1, 1)
    with pytest.raises(RankError, match="folder with other files"):
        run_ranks(save_after_a_run, 1, other, [])
    assert (other / "last.ckpt").exists()


@pytest.mark.parametrize("lost", ["meta.pt", "__0_0.distcp"])
def test_a_folder_that_lacks_a_file_is_refused(lost: str, folder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.ckpt"
    shutil.copytree(folder, half)
    (half / lost).unlink()
    with pytest.raises(RankError, match=rf"damaged: it lacks {lost}. Resume from another"):
        run_ranks(resume, 1, half, 1, 1)


@pytest.mark.parametrize("cut", ["meta.pt", "__0_0.distcp", ".metadata"])
def test_a_folder_with_a_file_that_was_cut_is_refused(
    cut: str, folder: Path, tmp_path: Path
) -> None:
    half = tmp_path / "half.ckpt"
    shutil.copytree(folder, half)
    (half / cut).write_bytes((half / cut).read_bytes()[:-3])
    with pytest.raises(RankError, match=r"half\.ckpt can't be read .* resume from an earlier one"):
        run_ranks(resume, 1, half, 1, 1)
    with pytest.raises(SystemExit, match=r"half\.ckpt can't be read"):
        cli.main(["consolidate", str(half), str(tmp_path / "one.ckpt")])
    assert not (tmp_path / "one.ckpt").exists()


def save_after_a_run(path: Path, plugins: list[Any]) -> None:
    run = trainer(devices=1, max_steps=1, strategy=strategy(1), plugins=plugins)
    run.fit(Rich())
    run.save_checkpoint(path)


class OwnIO(TorchCheckpointIO):
    pass


@pytest.mark.parametrize("plugin", [OwnIO(), AsyncCheckpointIO(OwnIO())])
def test_ones_own_plugin_is_refused(plugin: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="OwnIO writes checkpoints in one process"):
        run_ranks(save_after_a_run, 1, tmp_path / "saved.ckpt", [plugin])


def test_the_commands_say_what_is_wrong(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("text")
    torch.save({"state_dict": [1]}, tmp_path / "odd")
    for arguments, message in [
        (["consolidate", str(tmp_path), str(tmp_path / "one")], "is a folder, but no sharded"),
        (["consolidate", str(tmp_path / "no"), str(tmp_path / "one")], "There is no checkpoint"),
        (["consolidate", str(tmp_path / "taken"), str(tmp_path / "one")], "is a file, not a"),
        (["consolidate", str(folder), str(tmp_path / "taken")], "is there already"),
        (["consolidate", str(folder), str(tmp_path), "--overwrite"], "is a folder: give"),
        (["shard", str(folder), str(tmp_path / "one")], "is a folder: give the file"),
        (["shard", str(tmp_path / "taken"), str(tmp_path / "one")], "no Lightning checkpoint"),
        (["shard", str(tmp_path / "odd"), str(tmp_path / "one")], "it has no 'state_dict'"),
        (["shard", str(tmp_path / "taken"), str(folder)], "is there already"),
    ]:
        with pytest.raises(SystemExit, match=message) as caught:
            cli.main(arguments)
        assert str(caught.value).startswith("lightning-gpipe: ")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "make an ordinary checkpoint of a sharded one" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"taken", "odd"}


# ---------------------------------------------------------------------- what else saves


class FarAway(DirFileSystem):
    """A file system that isn't the disk, for all that anyone knows; it renames no folder."""

    protocol = "faraway"

    def __init__(self, **options: Any) -> None:
        super().__init__(path=os.environ["FAR_AWAY"], fs=LocalFileSystem(), **options)

    def mv(self, one: str, other: str, **options: Any) -> None:
        if self.isdir(one):
            raise NotImplementedError("a folder can't be renamed")
        super().mv(one, other, **options)


def save_far_away(root: Path, is_sharded: bool) -> dict[str, Tensor]:
    """Save the last and the best, go on from either, and look what is there."""
    os.environ["FAR_AWAY"] = str(root)
    fsspec.register_implementation("faraway", FarAway, clobber=True)
    states = []
    for epochs, path in ((1, None), (EPOCHS, "faraway://run/last.ckpt"), (EPOCHS, None)):
        torch.manual_seed(3)
        module = Rich()
        run = trainer(
            devices=2,
            max_epochs=epochs,
            strategy=strategy(2, save_distributed_checkpoint=is_sharded),
            callbacks=[
                ModelCheckpoint("faraway://run", filename="{epoch}", save_last=True, monitor="loss")
            ],
            enable_checkpointing=True,
        )
        run.fit(module, ckpt_path=path)
        states.append(copy.deepcopy(dict(module.named_parameters())))
    run.test(module, ckpt_path="best")
    torch.testing.assert_close(states[1], states[2], rtol=0, atol=1e-10)
    return states[0]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_far_away(is_sharded: bool, tmp_path: Path) -> None:
    run_ranks(save_far_away, 2, tmp_path, is_sharded)
    last = tmp_path / "run" / "last.ckpt"
    assert last.is_dir() == is_sharded
    assert not list(tmp_path.rglob("*.tmp"))
    if is_sharded:
        assert len(Folder(last).checkpoint()["state_dict"].whole()) > 10


def evaluate(folder: Path) -> Any:
    """Every way to name a checkpoint, and what callbacks and hooks find in one."""
    torch.manual_seed(1)
    saving = ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last="link")
    run = trainer(
        devices=2,
        max_epochs=3,
        strategy=strategy(2),
        callbacks=[saving, EarlyStopping("loss", patience=5)],
        enable_checkpointing=True,
    )
    module = Scored()
    run.fit(module)
    names = sorted(p.name for p in folder.iterdir())
    if not (len(names) == 2 and names[1] == "last.ckpt" and (folder / names[0]).is_dir()):
        raise AssertionError(names)
    whole = run.test(module, ckpt_path="best"), run.validate(module, ckpt_path="last")
    data = module.train_dataloader()
    first = run.predict(module, data, ckpt_path=saving.best_model_path)
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    if run.global_rank == 0 and "optimizer_states" in Folder(folder / "weights.ckpt").checkpoint():
        raise AssertionError("weights only")
    fresh = Scored()
    alone = trainer(devices=2, strategy=strategy(2, balance="params"))
    again = alone.test(fresh, ckpt_path=folder / "weights.ckpt")
    torch.testing.assert_close(again, whole[0])
    torch.testing.assert_close(alone.predict(fresh, data, ckpt_path=folder / "last.ckpt"), first)
    return whole


class Scored(models.Around):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.loss(*batch))

    test_step = validation_step
    val_dataloader = test_dataloader = models.Module.train_dataloader

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])


def test_folders_are_named_as_files_are(tmp_path: Path) -> None:
    run_ranks(evaluate, 2, tmp_path)


def averaged(path: Path, stages: int, epochs: int, ckpt: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    module = models.Around()
    run = trainer(
        devices=max(stages, 1),
        max_epochs=epochs,
        strategy=strategy(stages) if stages else "auto",
        callbacks=[EMAWeightAveraging(decay=0.8)],
    )

    class Saves(Callback):
        def on_train_epoch_end(self, run: Any, *_: Any) -> None:
            run.save_checkpoint(path)

    run.callbacks.append(Saves())
    run.fit(module, ckpt_path=ckpt)
    return module.state_dict()


def test_averages_of_weights_are_whole(tmp_path: Path) -> None:
    path, whole = tmp_path / "saved.ckpt", tmp_path / "whole.ckpt"
    expected = averaged(whole, 0, 1, None)
    run_ranks(averaged, 3, path, 3, 1, None)
    one, ordinary = Folder(path).checkpoint(), torch.load(whole, weights_only=True)
    for key in ("state_dict", "current_model_state"):
        found = dict(one[key].whole())
        torch.testing.assert_close(found, dict(ordinary[key]), rtol=0, atol=1e-10)
    torch.testing.assert_close(one["averaging_state"], ordinary["averaging_state"])
    expected = averaged(tmp_path / "unused.ckpt", 0, 2, None)
    found = run_ranks(averaged, 2, tmp_path / "on.ckpt", 2, 2, path)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Two(models.Around):
    """Two optimizers, of which one keeps nothing, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(*batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        outside = [*self.before.parameters(), *self.after.parameters()]
        adam = torch.optim.Adam(self.backbone.parameters(), lr=1e-3)
        return [adam, torch.optim.SGD(outside, lr=1e-2)]


class Nothing(models.Module):
    def configure_optimizers(self) -> Any:
        return None


def save_both(path: Path, kind: type[models.Module]) -> None:
    for name, is_sharded in (("sharded", True), ("whole", False)):
        torch.manual_seed(4)
        chosen = strategy(2, save_distributed_checkpoint=is_sharded, balance="params")
        run = trainer(devices=2, max_steps=2, strategy=chosen, plugins=[AsyncCheckpointIO()])
        run.callbacks.append(SavesOften(path / name))
        run.fit(kind())
        run.save_checkpoint(path / f"after-{name}")


@pytest.mark.parametrize("kind", [Two, Nothing])
def test_any_number_of_optimizers(kind: Any, tmp_path: Path) -> None:
    run_ranks(save_both, 2, tmp_path, kind)
    for prefix in ("", "after-"):
        sharded, one = tmp_path / f"{prefix}sharded", tmp_path / f"{prefix}one"
        cli.main(["consolidate", str(sharded), str(one)])
        found = torch.load(one, weights_only=True)
        expected = torch.load(tmp_path / f"{prefix}whole", weights_only=True)
        _assert_same({key: found[key] for key in expected}, expected)
        assert found.keys() == expected.keys()


def train_meanwhile(path: Path) -> list[int]:
    """Save in the background, slowly: training goes on, and one save follows the other."""
    steps: list[int] = []
    write = filesystem.FileSystemWriter.write_data

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        steps.append(run.global_step)
        return write(*args)

    filesystem.FileSystemWriter.write_data = slow  # type: ignore[method-assign]
    try:
        saving = ModelCheckpoint(path, every_n_train_steps=8, save_top_k=1, filename="{step}")
        run = trainer(
            devices=2,
            max_steps=20,
            strategy=strategy(2),
            plugins=[AsyncCheckpointIO()],
            callbacks=[saving],
            enable_checkpointing=True,
        )
        run.fit(Rich())
    finally:
        filesystem.FileSystemWriter.write_data = write  # type: ignore[method-assign]
    return steps


def test_saving_in_the_background(tmp_path: Path) -> None:
    for steps in run_ranks(train_meanwhile, 2, tmp_path):
        assert len(steps) == 2
        assert steps[0] > 8
    (only,) = tmp_path.iterdir()
    checkpoint = Folder(only).checkpoint()
    assert only.name == f"step={checkpoint['global_step']}.ckpt" == "step=16.ckpt"
    states = checkpoint["optimizer_states"][0]["state"]
    assert {int(state["step"]) for state in states.values()} == {16}, "as it was when saved"


def save_early(path: Path) -> bool:
    """Save before the cut: ranks that aren't seeded alike have other weights until then."""

    class Early(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            run.save_checkpoint(path)

    torch.manual_seed(run_rank())
    module = Rich()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    run = trainer(devices=4, max_steps=1, strategy=strategy(2), callbacks=[Early()])
    run.fit(module)
    saved = Folder(path).checkpoint()["state_dict"]
    return all(torch.equal(saved[name], value) for name, value in before.items())


def run_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def test_what_is_saved_before_the_cut_is_the_first_ranks(tmp_path: Path) -> None:
    assert run_ranks(save_early, 4, tmp_path / "saved.ckpt") == [True, False, False, False]


def save_unlike_buffers(path: Path) -> None:
    """Save buffers that differ between replicas, and a note that differs between ranks."""

    class Changes(Callback):
        def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
            if not module.backbone[6].offset.is_meta:
                module.backbone[6].offset.fill_(run_rank())
            Noted.get_extra_state = lambda noted: run_rank()  # type: ignore[method-assign]
            run.save_checkpoint(path)

    kept = Noted.get_extra_state
    chosen = strategy(2, broadcast_buffers=False)
    try:
        trainer(devices=4, max_steps=1, strategy=chosen, callbacks=[Changes()]).fit(Rich())
    finally:
        Noted.get_extra_state = kept  # type: ignore[method-assign]


def test_the_first_replicas_buffers_are_saved(tmp_path: Path) -> None:
    run_ranks(save_unlike_buffers, 4, tmp_path / "saved.ckpt")
    saved = Folder(tmp_path / "saved.ckpt").checkpoint()["state_dict"]
    assert saved["backbone.6.offset"].unique().tolist() == [1], "that of stage 1"
    assert saved["backbone.6._extra_state"] == 1


class Interrupts(Callback):
    def on_train_batch_start(self, run: Any, *_: Any) -> None:
        if run.global_rank == 1 and run.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


MANY = 1000  # steps, more than there are until every rank has heard of an interrupt


def interrupt(path: Path) -> None:
    write_data = filesystem.FileSystemWriter.write_data

    def slow(*args: Any) -> Any:
        time.sleep(1)
        return write_data(*args)

    filesystem.FileSystemWriter.write_data = slow  # type: ignore[method-assign]
    trainer(
        devices=2,
        max_steps=MANY,
        strategy=strategy(2),
        plugins=[AsyncCheckpointIO()],
        callbacks=[OnExceptionCheckpoint(path, "saved"), Interrupts()],
        enable_checkpointing=True,
    ).fit(Rich())


def test_ctrl_c_waits_for_what_is_saved(tmp_path: Path) -> None:
    for process in start_ranks(interrupt, 2, tmp_path, tmp_path / "run"):
        process.join(60)
        assert process.exitcode not in (0, None)
    (only,) = (tmp_path / "run").iterdir()
    # the other rank hears of it in time, not at once
    assert 2 <= Folder(only).checkpoint()["global_step"] < MANY


class Alone(Rich):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            checkpoint["kept"] = {name: v.detach() for name, v in self.named_parameters()}


def save_alone(path: Path) -> None:
    callbacks: list[Callback] = [SavesOften(path)]
    trainer(devices=2, max_steps=1, strategy=strategy(2), callbacks=callbacks).fit(Alone())


def test_weights_that_one_rank_alone_adds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"No rank has a value for 'kept.backbone.4.bias'"):
        run_ranks(save_alone, 2, tmp_path / "saved.ckpt")
    assert not list(tmp_path.iterdir())
