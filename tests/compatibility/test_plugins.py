"""Every built-in plugin and profiler, and every cluster environment."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import plugins as pg
from lightning.pytorch import profilers as pf
from torch import nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy import refusals
from tests.compatibility.rows import Module, Refused, Row, Rows, Shown, check
from tests.ranks import run_ranks
from tests.training import train


class Single(Module):
    """In single precision, which plugins change."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([t.to(self.dtype) for t in batch], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step([t.to(self.dtype) for t in batch], batch_idx)


class Half(Single):
    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.mse_loss(self(x).float(), y.float())


def saving(plugin: type) -> Any:
    def make(folder: Path) -> dict[str, Any]:
        return {"plugins": [plugin()], "enable_checkpointing": True, "default_root_dir": folder}

    return make


def weights(run: L.Trainer, module: Any, folder: Path) -> Any:
    run.strategy.checkpoint_io.teardown()  # ends what is written aside
    path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    return torch.load(path, weights_only=False)["state_dict"]


class OwnIO(pg.TorchCheckpointIO):
    """A user's way to write checkpoints."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        checkpoint["own"] = True
        super().save_checkpoint(checkpoint, path, storage_options)


def own_mark(run: L.Trainer, module: Any, folder: Path) -> Any:
    path = run.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    return torch.load(path, weights_only=False)["own"]


class OwnCluster(LightningEnvironment):
    """A user's cluster, which has started the processes."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def cluster(environment: type, nodes: int = 1, **variables: str) -> Shown:
    """A cluster environment of two processes.

    Args:
        environment: The plugin.
        nodes: On how many nodes.
        variables: Those of the environment that it reads; ``{rank}`` is this process's.
    """

    def test(folder: Path) -> None:
        (folder / "hosts").write_text("\n".join(["launch", *[socket.gethostname()] * 2]))
        L.seed_everything(5, verbose=False)
        plain = train(Module(), max_epochs=1)
        found = run_ranks(_in_cluster, 2, environment, nodes, str(folder), variables)[0]
        torch.testing.assert_close(found, plain, atol=1e-10, rtol=0)

    return Shown(test)


def _in_cluster(environment: Any, nodes: int, folder: str, variables: dict[str, str]) -> Any:
    before = dict(os.environ)
    place = {"rank": before["LOCAL_RANK"], "folder": folder}
    os.environ.update({name: value.format(**place) for name, value in variables.items()})
    try:
        L.seed_everything(5, verbose=False)
        return train(
            Module(),
            max_epochs=1,
            devices=2 // nodes,
            num_nodes=nodes,
            strategy=GPipeStrategy(3, stages=2),
            plugins=[environment()],
        )
    finally:
        os.environ.clear()
        os.environ.update(before)


def unsupported(kind: type) -> Shown:
    """A precision for other strategies or devices; its own package isn't needed to refuse it."""

    def test(folder: Path) -> None:
        with pytest.raises(ValueError, match=f"{kind.__name__} isn't for GPipeStrategy"):
            refusals.refuse_precision(object.__new__(kind))

    return Shown(test)


def without_xla(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        pg.XLACheckpointIO()


class OwnProfiler(pf.Profiler):
    """A user's profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def start(self, action_name: str) -> None:
        self.started += 1

    def stop(self, action_name: str) -> None:
        pass


def profiled(run: L.Trainer, module: Any, folder: Path) -> Any:
    """The actions that were timed."""
    profiler: Any = run.profiler
    return "run_training_batch" in (
        getattr(profiler, "recorded_durations", None) or profiler.profiled_actions
    )


ROWS: Rows = {
    "AsyncCheckpointIO": Row(saving(pg.AsyncCheckpointIO), also=weights),
    "BitsandbytesPrecision": unsupported(pg.BitsandbytesPrecision),
    "CheckpointIO": Row(saving(OwnIO), also=own_mark),
    "ClusterEnvironment": cluster(OwnCluster),
    "DeepSpeedPrecision": unsupported(pg.DeepSpeedPrecision),
    "DoublePrecision": Row({"plugins": [pg.DoublePrecision()]}),
    "FSDPPrecision": Refused("FSDPPrecision", {"plugins": [pg.FSDPPrecision("bf16-mixed")]}),
    "HalfPrecision": Row({"plugins": [pg.HalfPrecision("bf16-true")]}, Half, atol=0.02),
    "KubeflowEnvironment": cluster(KubeflowEnvironment, nodes=2, RANK="{rank}"),
    "LSFEnvironment": cluster(
        LSFEnvironment,
        LSB_JOBID="7",
        LSB_DJOB_RANKFILE="{folder}/hosts",
        JSM_NAMESPACE_LOCAL_RANK="{rank}",
        JSM_NAMESPACE_RANK="{rank}",
        JSM_NAMESPACE_SIZE="2",
    ),
    "LayerSync": Refused("needs GPUs", {"plugins": [pg.TorchSyncBatchNorm()]}),
    "LightningEnvironment": cluster(LightningEnvironment),
    "MixedPrecision": Row({"plugins": [pg.MixedPrecision("bf16-mixed", "cpu")]}, Half, atol=0.02),
    "Precision": Row({"plugins": [pg.Precision()]}),
    "SLURMEnvironment": cluster(
        SLURMEnvironment,
        SLURM_JOB_ID="7",
        SLURM_PROCID="{rank}",
        SLURM_LOCALID="{rank}",
        SLURM_NODEID="0",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="1",
        SLURM_JOB_NAME="train",
    ),
    "TorchCheckpointIO": Row(saving(pg.TorchCheckpointIO), also=weights),
    "TorchElasticEnvironment": cluster(
        TorchElasticEnvironment, RANK="{rank}", GROUP_RANK="0", TORCHELASTIC_RUN_ID="7"
    ),
    "TorchSyncBatchNorm": Refused("needs GPUs", {"plugins": [pg.TorchSyncBatchNorm()]}),
    "TransformerEnginePrecision": unsupported(pg.TransformerEnginePrecision),
    "XLACheckpointIO": Shown(without_xla),
    "XLAPrecision": unsupported(pg.XLAPrecision),
    "AdvancedProfiler": Row({"profiler": "advanced"}, also=profiled),
    "PassThroughProfiler": Row({"profiler": pf.PassThroughProfiler()}),
    "Profiler": Row({"profiler": OwnProfiler()}, also=lambda run, *_: bool(run.profiler.started)),
    "PyTorchProfiler": Row(
        lambda folder: {"profiler": pf.PyTorchProfiler(dirpath=folder, filename="p")}
    ),
    "SimpleProfiler": Row({"profiler": pf.SimpleProfiler()}, also=profiled),
}


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    check(__name__, ROWS, name, tmp_path)
