"""Checkpoint files: written whole or not at all, read with a word on what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from typing_extensions import override

from lightning_gpipe.model.partition import Partition

#: The entry of a checkpoint that tells how it was trained. Plain Lightning ignores it.
RECORD = "lightning_gpipe"


class WholeFileIO(TorchCheckpointIO):
    """Lightning's default, except that a file is replaced only once the new one is written.

    Lightning's own moves the new file from the temporary folder, which may be on another disk,
    where moving is copying.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        temporary = f"{local}.{os.getpid()}.tmp"
        try:
            super().save_checkpoint(checkpoint, temporary, storage_options)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, local)
        finally:
            with suppress(FileNotFoundError):
                os.remove(temporary)


def with_whole_files(plugin: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, where it only wraps another one around :class:`WholeFileIO`."""
    if plugin is None:
        return WholeFileIO()
    if getattr(plugin, "checkpoint_io", plugin) is None:
        plugin.__dict__["_checkpoint_io"] = WholeFileIO()
    return plugin


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
    try:
        checkpoint = load()
    except OSError:  # not the file's fault
        raise
    except Exception as error:
        if "Unsupported global" in str(error):  # weights_only=True, with a remedy of its own
            raise
        raise ValueError(
            f"The checkpoint {path} can't be read ({type(error).__name__}: {error}). It may be cut"
            " short by a full disk or a killed process, or be no checkpoint at all: resume from an"
            " earlier one."
        ) from error
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        raise ValueError(
            f"{path} is no Lightning checkpoint: it has no 'state_dict'. Weights that were saved by"
            " themselves are loaded with module.load_state_dict(torch.load(path)) before the"
            " Trainer runs."
        )
    return dict(checkpoint)


def difference(checkpoint: Mapping[str, Any], chunks: int) -> str | None:
    """What to warn of when a run goes on from a checkpoint; None: nothing.

    Args:
        checkpoint: What is resumed from.
        chunks: M of this run.
    """
    before = checkpoint.get(RECORD, {}).get("chunks")
    if before in (None, chunks):
        return None
    return (
        f"The checkpoint was trained with {before} micro-batches a mini-batch, and this run has"
        f" {chunks}: batch norm and dropout see others than before. Give"
        f" GPipeStrategy(chunks={before}) to go on with the same; chunks='auto' follows the number"
        " of stages."
    )
