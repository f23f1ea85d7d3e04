"""Checkpoint files and folders: written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from zipfile import is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_gpipe.state import replacing
from lightning_gpipe.state.parts import Part, refuse_other_files, remove, write
from lightning_gpipe.state.sharded import Folder
from lightning_gpipe.strategy import patches
from lightning_gpipe.strategy.reader import world_as_it_is


def _as_saved(storage: Any, location: Any) -> Any:
    """Leave a tensor's memory on the host."""
    return storage


class WholeFileIO(TorchCheckpointIO):
    """Lightning's default, except that a file is replaced only once the new one is written.

    Lightning's own moves the new file from the temporary folder, which may be on another disk,
    where moving is copying. Sharded checkpoints, which are folders, are read, written and removed
    in the same way.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any] | Part, path: Any, storage_options: Any | None = None
    ) -> None:
        if isinstance(checkpoint, Part):
            with world_as_it_is():  # this may be the background, while a batch is read
                write(checkpoint, str(path))
            return
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_other_files(local)
        with replacing.replaced(local) as temporary:
            super().save_checkpoint(checkpoint, temporary, storage_options)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = _as_saved, weights_only: bool | None = None
    ) -> dict[str, Any]:
        system, local = url_to_fs(str(path))
        is_local = isinstance(system, LocalFileSystem)
        if is_local:
            path = local = replacing.found(local)
        if system.isdir(local):
            return Folder(path).checkpoint(weights_only)
        if not is_local or not is_zipfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        # what a process doesn't hold is never read
        loaded: dict[str, Any] = torch.load(
            local, map_location=map_location, mmap=True, weights_only=weights_only
        )
        return loaded

    @override
    def remove_checkpoint(self, path: Any) -> None:
        system, local = url_to_fs(str(path))
        if system.isdir(local):
            remove(str(path))
        else:
            super().remove_checkpoint(path)


def with_whole_files(plugin: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, where it only wraps another one around :class:`WholeFileIO`."""
    if plugin is None:
        return WholeFileIO()
    if getattr(plugin, "checkpoint_io", plugin) is None:
        plugin.__dict__["_checkpoint_io"] = WholeFileIO()
    return plugin


def refuse_for_parts(plugin: CheckpointIO | None) -> None:
    """Refuse a plugin that would have to write what every rank has a part of.

    Raises:
        ValueError: With what to do instead.
    """
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    if inner is not None and type(inner) is not WholeFileIO:
        raise ValueError(
            f"{type(inner).__name__} writes checkpoints in one process, and with"
            " save_distributed_checkpoint=True every process writes a part: leave the plugin out"
            " (AsyncCheckpointIO() alone writes in the background), or give"
            " save_distributed_checkpoint=False."
        )


def save_part(
    plugin: CheckpointIO, part: Part, path: Any, storage_options: Any | None = None
) -> None:
    """Write a rank's part of a checkpoint. Collective over the part's group.

    Args:
        plugin: The Trainer's. AsyncCheckpointIO: a copy is written in the background, once what was
            saved before is written.
        part: This rank's.
        path: Where to.
        storage_options: Nobody takes them.
    """
    if storage_options is not None:
        raise TypeError(
            "trainer.save_checkpoint(storage_options=...) is for one's own CheckpointIO, which"
            " save_distributed_checkpoint=True doesn't use: leave it out."
        )
    if isinstance(plugin, AsyncCheckpointIO):
        wait_for_parts(plugin)
        part = part.in_host()
    plugin.save_checkpoint(cast(Any, part), path)


def wait_for_parts(plugin: CheckpointIO) -> None:
    """Wait until what is saved in the background is written, and raise its error."""
    if isinstance(plugin, AsyncCheckpointIO):
        if plugin._executor is not None:
            plugin._executor.submit(bool).result()  # its one thread keeps the order
        raise_if_failed(plugin)


def raise_if_failed(plugin: CheckpointIO) -> None:
    """Raise the error of what was saved in the background."""
    error = plugin._error if isinstance(plugin, AsyncCheckpointIO) else None
    if error is not None:
        raise error


@contextmanager
def removed_after_saving(plugin: CheckpointIO) -> Iterator[None]:
    """Let a plugin that writes in the background remove there, too.

    A file that a new one replaces would be gone before the new one is written, or fails to be.

    Args:
        plugin: The Trainer's.
    """
    if not isinstance(plugin, AsyncCheckpointIO):
        yield
        return
    remove = partial(_remove_in_turn, plugin, plugin.remove_checkpoint)
    with patches.ASYNC_REMOVE.replaced(remove, plugin):
        yield


def _remove_in_turn(plugin: AsyncCheckpointIO, remove: Callable[..., None], path: Any) -> None:
    def unless_saving_failed() -> None:
        if plugin._error is None:
            remove(path)

    if plugin._executor is None:
        unless_saving_failed()
    else:
        plugin._executor.submit(unless_saving_failed)  # its one thread keeps the order
