"""A dict of a checkpoint whose values stay in its folder until they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_gpipe.state.sharded import Folder


class Stored(MutableMapping[Any, Any]):
    """Behaves as the dict does: what is read is kept, and may be changed.

    Args:
        folder: Where they are read from.
        names: The name of each value in the folder, or a tree of names.
        tied: Keys of the same tensor: the first one by each of the others.
    """

    def __init__(
        self, folder: Folder, names: Mapping[Any, Any], tied: Mapping[str, str] | None = None
    ) -> None:
        self._folder, self._names, self._tied = folder, dict(names), tied or {}
        self._keys = dict.fromkeys(names)
        self._values: dict[Any, Any] = {}

    def set_metadata(self, metadata: Any) -> None:
        """Carry what PyTorch's state dicts carry: the versions of modules."""
        if metadata is not None:
            self._metadata = metadata

    def __getitem__(self, key: Any) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        if key not in self._values:
            self._values[key] = self._folder.read(self._names[key])
        return self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._keys[key] = None
        self._values[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._keys[key]
        self._values.pop(key, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __repr__(self) -> str:
        return f"Stored({', '.join(map(repr, self))})"

    def only(self, keys: Iterable[Any]) -> dict[Any, Any]:
        """Some of the values; what is read for this isn't kept."""
        wanted = list(keys)
        names = {key: self._names[key] for key in wanted if key not in self._values}
        read = self._folder.read(names)
        return {key: self._values[key] if key in self._values else read[key] for key in wanted}

    def whole(self) -> dict[Any, Any]:
        """All of it as an ordinary dict, with one tensor for tied weights."""
        first = {key: self._tied.get(key, key) for key in self}
        is_tied = {key for key, name in first.items() if name != key and name in self}
        read = self.only(key for key in self if key not in is_tied)
        return self._like({key: read[first[key]] if key in is_tied else read[key] for key in self})

    def fill(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Read a module's state dict into its own tensors.

        Args:
            own: What the module has; what is on the meta device is left there.

        Returns:
            What ``load_state_dict`` takes: these tensors, and what isn't one of them.
        """
        values: dict[str, Any] = {}
        targets: dict[str, Tensor] = {}
        for key in self:
            mine, name = own.get(key), self._names.get(key)
            shape = self._folder.shape(name) if key not in self._values and name else None
            if not isinstance(mine, Tensor) or mine.shape != shape:
                values[key] = None
            elif mine.is_meta:
                values[key] = torch.empty(mine.shape, dtype=mine.dtype, device="meta")
            else:
                values[key] = targets[key] = mine
        with torch.no_grad():
            self._folder.fill((self._names[key], target) for key, target in targets.items())
        values.update(self.only(key for key, value in values.items() if value is None))
        return self._like(values)

    def _like(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """With what PyTorch's state dicts carry."""
        if hasattr(self, "_metadata"):
            values = OrderedDict(values)
            setattr(values, "_metadata", self._metadata)  # noqa: B010  (no attribute of the class)
        return values
