"""Checkpoint files: written whole or not at all."""

from __future__ import annotations

import glob
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from zipfile import is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_gpipe.strategy import patches

_HOST = platform.node()


def _as_saved(storage: Any, location: Any) -> Any:
    """Leave a tensor's memory on the host."""
    return storage


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
        _remove_leftovers(local)
        temporary = f"{local}.{_HOST}-{os.getpid()}.tmp"
        try:
            super().save_checkpoint(checkpoint, temporary, storage_options)
            _to_disk(temporary)
            os.replace(temporary, local)
            _to_disk(os.path.dirname(local))
        finally:
            with suppress(FileNotFoundError):
                os.remove(temporary)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = _as_saved, weights_only: bool | None = None
    ) -> dict[str, Any]:
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem) or not is_zipfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        # what a process doesn't hold is never read
        loaded: dict[str, Any] = torch.load(
            local, map_location=map_location, mmap=True, weights_only=weights_only
        )
        return loaded


def _to_disk(path: str) -> None:
    """Wait until a file, or the names in a folder, would outlive a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove_leftovers(target: str) -> None:
    """Remove what killed processes of this machine have left of earlier tries to write a file."""
    for name in glob.glob(f"{glob.escape(target)}.{_HOST}-*.tmp"):
        process = name.removesuffix(".tmp").rpartition("-")[2]
        if process.isdigit() and not _is_alive(int(process)):
            with suppress(FileNotFoundError):
                os.remove(name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def with_whole_files(plugin: CheckpointIO | None) -> CheckpointIO:
    """The user's plugin, where it only wraps another one around :class:`WholeFileIO`."""
    if plugin is None:
        return WholeFileIO()
    if getattr(plugin, "checkpoint_io", plugin) is None:
        plugin.__dict__["_checkpoint_io"] = WholeFileIO()
    return plugin


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
