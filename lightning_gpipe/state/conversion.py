"""Sharded checkpoints into ordinary ones, and back."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_gpipe.state import replacing
from lightning_gpipe.state.damage import DamagedCheckpoint, reading
from lightning_gpipe.state.parts import Part, Share, write
from lightning_gpipe.state.sharded import Folder
from lightning_gpipe.state.stored import Stored


def consolidate(folder: str, file: str, overwrite: bool = False) -> None:
    """Write the ordinary Lightning checkpoint that a sharded one stands for.

    It takes as much host memory as the checkpoint is large, and a tensor more.

    Args:
        folder: The sharded checkpoint. It is unpickled: it must come from someone whom you trust.
        file: Where to.
        overwrite: Whether to replace a file that is there.

    Raises:
        OSError: If the folder is no whole checkpoint, or a file is there already.
        ValueError: If one of its files is damaged.
    """
    _refuse_existing(file, overwrite)
    system, local = url_to_fs(file)
    if system.isdir(local):
        raise IsADirectoryError(f"{file} is a folder: give the name of a file.")
    checkpoint = _whole(Folder(folder).checkpoint(weights_only=False))
    if not isinstance(system, LocalFileSystem):
        with system.open(local, "wb") as stream:
            torch.save(checkpoint, stream)
        return
    with replacing.replaced(local) as temporary:
        Path(local).parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, temporary)


def shard(file: str, folder: str, overwrite: bool = False) -> None:
    """Write the sharded checkpoint that stands for an ordinary one.

    An ordinary one doesn't name optimizers' parameters: they are called by their place, as
    ``params[3]``, which a pipeline and :func:`consolidate` go by.

    Args:
        file: A Lightning checkpoint. It is unpickled: it must come from someone whom you trust.
        folder: Where to.
        overwrite: Whether to replace a checkpoint that is there.

    Raises:
        OSError: If there is no such file, or a checkpoint is there already.
        ValueError: If the file is no Lightning checkpoint, or damaged.
    """
    _refuse_existing(folder, overwrite)
    if os.path.isdir(file):
        raise IsADirectoryError(f"{file} is a folder: give the file of an ordinary checkpoint.")
    checkpoint = _read(file)
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, Mapping):
        raise ValueError(f"{file} is no Lightning checkpoint: it has no 'state_dict'.")
    share = Share(True, frozenset(state), lambda key: True, (), _tied(state))
    write(Part(checkpoint, share, None), folder)


def _read(file: str) -> Any:
    system, local = url_to_fs(file)
    with system.open(local, "rb") as stream, reading(file):
        if not zipfile.is_zipfile(stream):
            raise DamagedCheckpoint(f"{file} is no Lightning checkpoint, or damaged.")
        stream.seek(0)
        if not isinstance(system, LocalFileSystem):
            return torch.load(stream, map_location="cpu", weights_only=False)
        return torch.load(local, map_location="cpu", mmap=True, weights_only=False)


def _refuse_existing(path: str, overwrite: bool) -> None:
    system, local = url_to_fs(path)
    if system.exists(local) and not overwrite:
        raise FileExistsError(f"{path} is there already: choose another name, or --overwrite it.")


def _whole(value: Any) -> Any:
    """A checkpoint with all that is stored in host memory."""
    if isinstance(value, Stored):
        return value.whole()
    if type(value) is dict:
        return {key: _whole(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_whole(entry) for entry in value]
    return value


def _tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Keys of the same tensor: the first one by each of the others."""
    first: dict[Any, str] = {}
    tied = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            if first.setdefault(place, key) != key:
                tied[key] = first[place]
    return tied
