"""The parts of a sharded checkpoint, and how all ranks write theirs at the same time."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.model.parameters import trained_by
from lightning_gpipe.state import replacing
from lightning_gpipe.state.sharded import LAST, OWN, REST, TABLE, names_in, remote

LOCAL = LocalFileSystem()
_T = TypeVar("_T")
#: Where a value stands in a checkpoint: the keys that lead to it.
KeyPath: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank writes of a checkpoint that all ranks write together.

    Args:
        is_first: Whether it writes the rest, and what is no tensor of a stage.
        keys: Of the module's state dict.
        writes: Whether it writes an entry with one of these keys.
        names: For each optimizer the names of its parameters, in order.
        tied: Keys of the same tensor: the first one by each of the others.
    """

    is_first: bool
    keys: frozenset[str]
    writes: Callable[[str], bool]
    names: Sequence[Sequence[str]]
    tied: Mapping[str, str] = field(default_factory=dict)


def names_of(
    module: nn.Module, optimizers: Iterable[Optimizer]
) -> tuple[list[list[str]], dict[str, str]]:
    """The names of optimizers' parameters in a module, and of the tensors that it has twice.

    Returns:
        For each optimizer the names in order; and the first name by each of the others.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    every = (module.named_parameters, module.named_buffers)
    for name, tensor in chain.from_iterable(named(remove_duplicate=False) for named in every):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    names = []
    for optimizer in optimizers:
        parameters = enumerate(trained_by(optimizer))
        names.append([first.get(id(p), _unnamed(i)) for i, p in parameters])
    return names, tied


class Part:
    """One rank's part of a checkpoint.

    Args:
        checkpoint: As Lightning makes it, with this rank's values.
        share: What this rank writes of it.
        group: All ranks, which write together, over the host; None: this one writes alone.
    """

    def __init__(
        self, checkpoint: Mapping[str, Any], share: Share, group: dist.ProcessGroup | None
    ) -> None:
        self.group = group
        self.values: dict[KeyPath, Any] = {}
        self.expected: list[str] = []  # what the ranks must write together
        states = checkpoint.get("optimizer_states")
        self._table: dict[str, Any] = {
            "mappings": [],
            "optimizers": None if states is None else len(states),
            "tied": dict(share.tied),
        }
        rest = self._rest(checkpoint, (), share)
        rest.pop("optimizer_states", None)
        for number, state in enumerate(states or ()):
            names = share.names[number] if number < len(share.names) else ()
            self.values.update(_optimizer_values(number, state, names, share.is_first))
        self.rest = _as_bytes({**rest, TABLE: self._table}) if share.is_first else b""

    def in_host(self) -> Part:
        """A copy that the next step doesn't change."""
        copied = copy.copy(self)
        copied.values = {
            place: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
            for place, v in self.values.items()
        }
        return copied

    def _rest(self, value: Mapping[Any, Any], place: KeyPath, share: Share) -> dict[Any, Any]:
        """What isn't spread over ranks: all but state dicts of the module or its copies."""
        rest: dict[Any, Any] = {}
        for key, entry in value.items():
            if not isinstance(entry, dict) or (key == "optimizer_states" and not place):
                rest[key] = entry
            elif not _is_state_dict(entry, share.keys):
                is_plain = type(entry) is dict  # what is changed is a copy
                rest[key] = self._rest(entry, (*place, key), share) if is_plain else entry
            else:
                where = (*place, key)
                metadata = getattr(entry, "_metadata", None)
                mapping = {"place": [*where], "keys": [*entry], "metadata": metadata}
                self._table["mappings"].append(mapping)
                self.expected += [".".join(map(str, (*where, name))) for name in entry]
                for name, item in entry.items():
                    is_here = not (isinstance(item, Tensor) and item.is_meta)
                    if is_here and share.writes(name):
                        self.values[where + (name,)] = item  # noqa: RUF005  (not in Python 3.10)
        return rest


def _is_state_dict(value: Mapping[Any, Any], keys: frozenset[str]) -> bool:
    """Whether it is a state dict of the module, or of a copy that a callback keeps."""
    return keys.issuperset(value) and any(isinstance(v, Tensor) for v in value.values())


def _optimizer_values(
    number: int, state: Mapping[str, Any], names: Sequence[str], is_first: bool
) -> Iterator[tuple[KeyPath, Any]]:
    """What stands in an optimizer's state dict, with names in the place of indices."""
    root = f"optimizer_{number}"

    def name_of(index: Any) -> Any:
        is_known = isinstance(index, int) and index < len(names)
        return names[index] if is_known else _unnamed(index)

    for index, entries in state.get("state", {}).items():
        place = (root, "state", name_of(index))
        if isinstance(entries, dict) and entries:
            yield from (((*place, key), value) for key, value in entries.items())
        else:
            yield place, entries
    if not is_first:
        return
    for key, value in state.items():
        if key == "param_groups":
            for which, group in enumerate(value):
                for name, entry in group.items():
                    is_list = name == "params"
                    yield (root, key, which, name), [*map(name_of, entry)] if is_list else entry
        elif key != "state":
            yield (root, key), value


def _unnamed(index: Any) -> str:
    """The name of an optimizer's parameter whose name in the module isn't known."""
    return f"params[{index}]"


def write(part: Part, path: str) -> None:
    """Write a checkpoint. Collective over the part's group.

    The folder appears under its name when it is whole. On file systems that can't rename a folder
    the file is written last without which it is no checkpoint.

    Args:
        part: This rank's.
        path: The folder; the first rank's counts.

    Raises:
        IsADirectoryError: If a folder stands there that is no checkpoint.
        RuntimeError: If a rank can't write its part, on all of them.
    """
    is_first = part.group is None or dist.get_rank(part.group) == 0
    target, folder = _told(part.group, partial(_begin, path, part.rest))
    try:
        with _explained(target, part.group):
            metadata = _write_values(part, folder)
        _told(part.group, partial(_finish, target, folder, metadata, part.expected))
    except BaseException:
        if is_first and folder != target:
            replacing.remove(folder)
        raise


def _begin(path: str, rest: bytes) -> tuple[str, str]:
    """Make the folder to write in, with the rest in it.

    Returns:
        Where the checkpoint will be, and that folder.
    """
    system, local = url_to_fs(path)
    is_local = isinstance(system, LocalFileSystem)
    target = local if is_local else path
    refuse_other_files(local, system)
    folder = local
    if is_local:
        replacing.remove_leftovers(target)
        folder = replacing.temporary_name(target)
        replacing.remove(folder)  # of an earlier save of this process that failed
    elif system.exists(local):
        remove(path)
    system.makedirs(folder, exist_ok=True)
    with system.open(f"{folder}/{REST}", "wb") as file:
        file.write(rest)
    return target, folder if is_local else path


def remove(path: str) -> None:
    """Remove a sharded checkpoint, so that what is left of it at any moment isn't taken for one."""
    system, local = url_to_fs(path)
    if isinstance(system, LocalFileSystem):
        replacing.remove_at_once(local)
        return
    with suppress(FileNotFoundError):
        system.rm(f"{local}/{LAST}")
    system.rm(local, recursive=True)


def refuse_other_files(path: str, system: Any = LOCAL) -> None:
    """Refuse to replace a folder that is no checkpoint.

    Args:
        path: The place of a checkpoint.
        system: Its file system.

    Raises:
        IsADirectoryError: If such a folder stands there.
    """
    names = names_in(system, path) if system.isdir(path) else []
    others = sorted(name for name in names if not OWN.fullmatch(name))
    if others:
        raise IsADirectoryError(
            f"{path} is a folder with other files ({others[0]}), and the checkpoint would replace"
            " it: choose another path."
        )


def _finish(target: str, folder: str, metadata: Metadata, expected: Sequence[str]) -> None:
    """Put the folder in its place, if all is there.

    Raises:
        FileNotFoundError: If machines write to different disks.
        ValueError: If nobody has written a value.
    """
    lost = [name for name in expected if name not in metadata.state_dict_metadata]
    if lost:
        raise ValueError(
            f"No rank has a value for '{lost[0]}' of the checkpoint: with"
            " save_distributed_checkpoint=True every rank writes what it holds, so what a hook adds"
            " of the module's weights it must add on every rank, not on rank 0 alone."
        )
    if folder == target:
        return
    missing = {info.relative_path for info in (metadata.storage_data or {}).values()}
    missing -= set(os.listdir(folder))
    if missing:
        raise FileNotFoundError(
            f"{sorted(missing)[0]} isn't in the folder that rank 0 sees, though a rank has written"
            f" it: put checkpoints on a file system that all machines share ({target})."
        )
    replacing.take_place(folder, target)


def _write_values(part: Part, folder: str) -> Metadata:
    write_all = partial(save, {}, storage_writer=_writer(folder), planner=_SavePlanner(part.values))
    if part.group is not None:
        metadata: Metadata = write_all(process_group=part.group)
        return metadata
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*intent is to save in a single process")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.8's own
        metadata = write_all(no_dist=True)
    return metadata


class _SavePlanner(DefaultSavePlanner):
    """Writes values as they are; PyTorch's own takes dicts among them apart, and loses some."""

    def __init__(self, values: Mapping[KeyPath, Any]) -> None:
        super().__init__()
        self._places = {".".join(map(str, place)): place for place in values}
        self._values = {name: values[place] for name, place in self._places.items()}
        if len(self._places) < len(values):
            raise ValueError("Two entries of the checkpoint have the same name in a folder.")

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict: dict[str, Any] = self._values
        self.mappings = self._places
        self.is_coordinator = is_coordinator


def _told(group: dist.ProcessGroup | None, action: Callable[[], _T]) -> _T:
    """Let the first rank act, and tell the others what came of it. Collective over the group."""
    if group is None:
        return action()
    told: list[Any] = [None]
    if dist.get_rank(group) != 0:
        dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
        is_error, value = told[0]
        if is_error:
            raise RemoteError(f"Rank 0 failed: {value}")
        result: _T = value
        return result
    source = dist.get_global_rank(group, 0)
    try:
        result = action()
    except Exception as error:
        dist.broadcast_object_list([(True, f"{type(error).__name__}: {error}")], source, group)
        raise
    dist.broadcast_object_list([(False, result)], source, group)
    return result


@contextmanager
def _explained(path: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say on every rank which one couldn't write, and why."""
    try:
        yield
    except CheckpointException as error:  # a BaseException
        rank, (cause, _) = min(error.failures.items())
        text = f"The checkpoint {path} isn't saved: rank {rank} can't write its part"
        text = f"{text} ({type(cause).__name__}: {cause}). What was saved there before is whole."
        if "unexpected pos" in str(cause):  # what PyTorch says of a file that it can't write on
            text = f"{text} The disk seems to be full."
        here = group is None or rank == dist.get_rank(group)
        raise (RuntimeError if here else RemoteError)(text) from cause


def _as_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _writer(folder: str) -> Any:
    if isinstance(url_to_fs(folder)[0], LocalFileSystem):
        return FileSystemWriter(folder)
    return remote().FsspecWriter(folder, sync_files=False)
