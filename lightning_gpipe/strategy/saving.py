"""What a checkpoint says of how it was trained, and what is wrong with one that is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_gpipe.model.partition import Partition
from lightning_gpipe.state.damage import reading

#: The entry of a checkpoint that tells how it was trained. Plain Lightning ignores it.
RECORD = "lightning_gpipe"


def record(chunks: int, stages: int, replicas: int, partition: Partition | None) -> dict[str, Any]:
    """How a checkpoint was trained.

    Args:
        chunks: M.
        stages: K.
        replicas: D.
        partition: The layers of each stage, as far as the module is cut.
    """
    sizes = list(partition.sizes) if partition is not None else None
    return {"chunks": chunks, "stages": stages, "replicas": replicas, "partition": sizes}


def read(load: Callable[[], Any], path: Any) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        load: Reads the file.
        path: Its name, for errors.

    Raises:
        ValueError: If the file is damaged or isn't a Lightning checkpoint.
    """
    with reading(path):
        checkpoint = load()
    state = checkpoint.get("state_dict") if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{path} is no Lightning checkpoint: it has no 'state_dict'. Weights that were saved by"
            " themselves are loaded with module.load_state_dict(torch.load(path)) before the"
            " Trainer runs."
        )
    return dict(checkpoint)


def warn_of_difference(before: int | None, chunks: int) -> None:
    """Warn when a run goes on with another number of micro-batches.

    Args:
        before: M of the run whose checkpoint is resumed from; None: it isn't known.
        chunks: M of this run.
    """
    if before not in (None, chunks):
        rank_zero_warn(
            f"The checkpoint was trained with {before} micro-batches a mini-batch, and this run has"
            f" {chunks}: batch norm and dropout, if the model has them, see others than before."
            f" Give GPipeStrategy(chunks={before}) to go on with the same; chunks='auto' follows"
            " the number of stages."
        )


def refuse_without_optimizers(checkpoint: Mapping[str, Any], path: Any, start_method: str) -> None:
    """Refuse to write what a run can't go on from, where the optimizers' state is gone.

    Args:
        checkpoint: What would be written.
        path: Its name, for the error.
        start_method: How the processes were started that had the state.

    Raises:
        RuntimeError: Unless only weights are saved.
    """
    if "optimizer_states" in checkpoint:
        raise RuntimeError(
            f"{path} is not saved: with start_method={start_method!r} fit runs in processes of its"
            " own, and the optimizers' state, without which a run can't go on, has ended with them."
            f' Save the weights with trainer.save_checkpoint("{path}", weights_only=True), or all'
            " within the run, with ModelCheckpoint in Trainer(callbacks=...)."
        )


@contextmanager
def named(path: Any) -> Generator[None, None, None]:
    """Name the file where writing it fails without a name, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def warn_of_loss(path: Any) -> None:
    """Warn that a file isn't written, so that an error isn't hidden by one of its own."""
    rank_zero_warn(
        f"{path} is not saved, because the run has failed: the other processes, which hold parts of"
        " what is saved, may be gone. The last checkpoint is the one saved before."
    )
