"""What users are told who seem to mean something else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

_READS_WORLD_SIZE = pl.Trainer.world_size.fget.__code__  # type: ignore[attr-defined]


def explain_one_stage() -> None:
    """Say why there is one stage, where the number of devices was not thought of."""
    rank_zero_info(
        "GPipeStrategy runs one stage, since the Trainer has one device (on a CPU, devices='auto'"
        " means one): give Trainer(devices=K) for K stages."
    )


def is_read_by_user(frame: FrameType) -> bool:
    """Whether a module or DataModule reads ``trainer.world_size``.

    Args:
        frame: That of the strategy's property.
    """
    trainer = frame.f_back
    if trainer is None or trainer.f_code is not _READS_WORLD_SIZE or trainer.f_back is None:
        return False
    reader = trainer.f_back
    if reader.f_globals.get("__name__", "").partition(".")[0] in {"lightning", "lightning_gpipe"}:
        return False
    names = reader.f_code.co_varnames[:1]
    reads = reader.f_locals.get(names[0]) if names else None
    return isinstance(reads, (pl.LightningModule, pl.LightningDataModule))


def warn_of_world_size(stages: int, replicas: int) -> None:
    """Say what ``trainer.world_size`` counts.

    Args:
        stages: K.
        replicas: D.
    """
    rank_zero_warn(
        f"trainer.world_size is {stages * replicas} here: {stages} stages x {replicas} replicas."
        " The stages of a pipeline work on the same batch, so a batch size or learning rate that"
        f" goes by the number of devices is meant to use trainer.strategy.replicas ({replicas})."
    )


def refuse_notebook(start_method: str) -> None:
    """Say how processes start in a notebook.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        f"start_method={start_method!r} starts the script once more for every process, and a"
        ' notebook is no script: use GPipeStrategy(start_method="fork"), and call no CUDA function'
        " before the Trainer does."
    )


def refuse_fork_of_autograd() -> None:
    """Say that a process can't be forked whose backwards use threads, where one has them.

    Raises:
        RuntimeError: If it has.
    """
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread may end meanwhile
            names.append(file.read_text())
    if any(name.startswith("pt_autograd") for name in names):
        raise RuntimeError(
            "start_method='fork' copies this process, which has computed gradients, or planned a"
            " run, beside a GPU: PyTorch can compute none in a copy of it. Restart the notebook's"
            " kernel, and let this Trainer be the first that computes."
        )
