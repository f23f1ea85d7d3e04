"""Sharded checkpoints: folders from which any process reads what it asks for.

A folder is written with ``torch.distributed.checkpoint``, in the form that Lightning gives its own:
state dicts and optimizers' states (by parameter name) in its files, and the rest of the checkpoint
in ``meta.pt``. What is read looks like an ordinary checkpoint, but its tensors stay in the folder
until they are asked for.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_gpipe.state import replacing
from lightning_gpipe.state.damage import reading
from lightning_gpipe.state.stored import Stored

#: The file for all but tensors, and the one without which a folder is no checkpoint.
REST, LAST = "meta.pt", ".metadata"
#: The names of a folder's files.
OWN = re.compile(r"meta\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp")
#: The entry of the rest that tells what stands in the other files.
TABLE = "lightning_gpipe_sharded"


class Folder:
    """A sharded checkpoint, of which any process reads what it asks for, on its own.

    Args:
        path: The folder, on a disk or a file system that fsspec knows.

    Raises:
        FileNotFoundError: If there is none, or one of its files is missing.
        NotADirectoryError: If it is a file.
        IsADirectoryError: If it is no whole checkpoint, with what to do instead.

    What it reads raises DamagedCheckpoint where a file isn't what was written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._system, local = url_to_fs(str(path))
        is_local = isinstance(self._system, LocalFileSystem)
        self.path = local = replacing.found(local) if is_local else local
        if not self._system.exists(local):
            raise FileNotFoundError(f"There is no checkpoint {path}.")
        if not self._system.isdir(local):
            raise NotADirectoryError(f"{path} is a file, not a sharded checkpoint.")
        self._names = names = names_in(self._system, local)
        if LAST not in names:
            if any(OWN.fullmatch(name) for name in names):
                raise IsADirectoryError(
                    f"{path} is a sharded checkpoint that was never finished (it has no {LAST}):"
                    " resume from an earlier one."
                )
            inside = sorted(n for n in names if n.endswith(".ckpt"))
            remedy = f"such as {path}/{inside[-1]}" if inside else "a .ckpt file or folder"
            raise IsADirectoryError(
                f"{path} is a folder, but no sharded checkpoint (it has no {LAST}): give the path"
                f" of a checkpoint, {remedy}."
            )
        self._check_for([REST])
        self._reader = _reader(local if is_local else str(path))

    def _check_for(self, files: Iterable[str]) -> None:
        """Check that none of its files is missing."""
        missing = sorted(set(files).difference(self._names))
        if missing:
            raise FileNotFoundError(
                f"{self.path} is damaged: it lacks {', '.join(missing[:3])}. Resume from another"
                " checkpoint."
            )

    def __deepcopy__(self, memo: Any) -> Folder:
        return self

    @cached_property
    def _metadata(self) -> Metadata:
        with reading(self.path):
            metadata: Metadata = self._reader.read_metadata()
        self._check_for(info.relative_path for info in (metadata.storage_data or {}).values())
        return metadata

    @cached_property
    def _tree(self) -> dict[Any, Any]:
        """Every value's name in the files, as a tree of the keys that lead to it."""
        tree: dict[Any, Any] = {}
        for name, place in (self._metadata.planner_data or {}).items():
            branch = tree
            for key in place[:-1]:
                branch = branch.setdefault(key, {})
            branch[place[-1]] = name
        return tree

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, on any device, with entries of the module's state dict.

        Args:
            tensors: By their keys in the state dict.

        Raises:
            KeyError: If the checkpoint has no such entry.
        """
        entries = self._tree.get("state_dict", {})
        self.fill((entries[key], tensor) for key, tensor in tensors.items())

    def optimizer(self, number: int, indices: Iterable[int]) -> dict[int, Any]:
        """What an optimizer keeps of parameters, in host memory.

        Args:
            number: Which optimizer.
            indices: The parameters' places in its groups, counted through.
        """
        state: Stored = self._optimizer(number)["state"]
        return state.only([index for index in indices if index in state])

    def checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint as an ordinary one, whose tensors are read when they are asked for.

        Args:
            weights_only: See ``torch.load``; for what stands beside tensors.
        """
        with self._system.open(f"{self.path}/{REST}", "rb") as file, reading(self.path):
            rest = torch.load(file, map_location="cpu", weights_only=weights_only)
        table = rest.pop(TABLE, {})
        optimizers = [root for root in self._tree if re.fullmatch(r"optimizer_\d+", str(root))]
        default = [{"place": ["state_dict"]}]  # what Lightning itself has written
        for mapping in table.get("mappings", default):
            *above, key = mapping["place"]
            parent, names = rest, self._tree
            for step in above:
                parent, names = parent[step], names.get(step, {})
            names = names.get(key, {})
            keys = [name for name in mapping.get("keys", names) if name in names]
            parent[key] = Stored(self, {name: names[name] for name in keys}, table.get("tied", {}))
            parent[key].set_metadata(mapping.get("metadata"))
        count = table.get("optimizers", len(optimizers) or None)
        if count is not None:
            rest["optimizer_states"] = [self._optimizer(number) for number in range(count)]
        return dict(rest)

    def _optimizer(self, number: int) -> dict[str, Any]:
        tree = dict(self._tree.get(f"optimizer_{number}", {}))
        groups = self.read([*dict(sorted(tree.pop("param_groups", {}).items())).values()])
        indices: dict[str, int] = {}
        for group in groups:
            for name in group["params"]:
                indices[name] = len(indices)
            group["params"] = [indices[name] for name in group["params"]]
        states = {
            indices.get(name, name): entries for name, entries in tree.pop("state", {}).items()
        }
        if all(isinstance(index, int) for index in states):
            states = dict(sorted(states.items()))
        state: dict[str, Any] = {"state": Stored(self, states)} if groups or states else {}
        if groups:
            state["param_groups"] = groups
        return {**state, **self.read(tree)}

    def read(self, names: Any) -> Any:
        """Read values.

        Args:
            names: A tree of dicts and lists of their names in the files.

        Returns:
            The tree, with the values in their place.
        """
        values = self.fill((name, None) for name in _leaves(names))
        return _replaced(names, values)

    def shape(self, name: str) -> torch.Size | None:
        """The shape of a tensor in the files; None: it is something else."""
        found = self._metadata.state_dict_metadata[name]
        return found.size if isinstance(found, TensorStorageMetadata) else None

    def fill(self, targets: Iterable[tuple[str, Tensor | None]]) -> dict[str, Any]:
        """Read values, into tensors where they are given.

        Args:
            targets: Names in the files, and where to; None: into new memory of the host.
        """
        values: dict[str, Any] = {}
        for name, target in targets:
            found = self._metadata.state_dict_metadata[name]
            if target is None and isinstance(found, TensorStorageMetadata):
                target = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
            values[name] = target
        planner, reader = _LoadPlanner(), self._reader
        planner.set_up_planner(values, self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([plan]))
        with reading(self.path):
            reader.read_data(planner.finish_plan(plan), planner).wait()
        return values


class _LoadPlanner(DefaultLoadPlanner):
    """Reads what is asked for, by its name in the files, into host memory."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=False)


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)


def _replaced(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, dict):
        return {key: _replaced(branch, values) for key, branch in tree.items()}
    return [_replaced(branch, values) for branch in tree]


def names_in(system: Any, folder: str) -> list[str]:
    """The names of what is in a folder of a file system."""
    return [os.path.basename(str(p).rstrip("/")) for p in system.ls(folder, detail=False)]


def _reader(folder: str) -> Any:
    if isinstance(url_to_fs(folder)[0], LocalFileSystem):
        return FileSystemReader(folder)
    return remote().FsspecReader(folder)


def remote() -> Any:
    """What PyTorch has for remote file systems; it may move."""
    try:
        from torch.distributed.checkpoint import _fsspec_filesystem
    except ImportError as error:
        raise ImportError(
            f"torch {torch.__version__} has no reader and writer of sharded checkpoints on remote"
            " file systems: give a path on a disk, or save_distributed_checkpoint=False."
        ) from error
    return _fsspec_filesystem
