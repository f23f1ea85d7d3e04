"""What must stay as it is while a model's loop runs over its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.model.places import Place, has_buffers, has_changed
from lightning_gpipe.model.snapshot import Snapshot

_LATER = "in the pipeline all blocks run then."


@dataclass(slots=True)
class WatchedPlace:
    """A place that must be the same when a block is called and when the last one is.

    Args:
        place: The place.
        snapshot: Of which names stand there; None: of none so far, or there are tensors.
    """

    place: Place
    snapshot: Snapshot | None = None

    def now(self) -> tuple[Snapshot | None, Any]:
        """What stands there, for :meth:`has_changed`."""
        snapshot = self.snapshot
        values = snapshot.values() if snapshot is not None else None
        if snapshot is None or has_buffers(self.place) or not snapshot.is_same(values):
            self.snapshot = snapshot = Snapshot.without_values(self.place)
            values = snapshot.values() if snapshot is not None else None
        return (None, self.place.contents()) if values is None else (snapshot, values)

    def has_changed(self, snapshot: Snapshot | None, before: Any) -> bool:
        """Whether something else stands there than when :meth:`now` gave this."""
        if snapshot is not None:
            if snapshot.is_still(before) and not has_buffers(self.place):
                return False
            before = {name: (v, None) for name, v in zip(snapshot.names, before, strict=True)}
        return has_changed(before, self.place.contents())


@dataclass(slots=True)
class Watched:
    """The tensors that blocks were called with, their attributes, and what they read besides."""

    _versions: list[tuple[Tensor, int]] = field(default_factory=list)  # when they were given
    _attributes: dict[int, tuple[nn.Module, dict[str, Any]]] = field(default_factory=dict)
    _places: dict[int, list[tuple[WatchedPlace, Any, Any]]] = field(default_factory=dict)

    def has(self, index: int) -> bool:
        """Whether a block is watched."""
        return index in self._attributes

    def tensor(self, tensor: Any) -> None:
        """Watch a tensor."""
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def block(self, index: int, block: nn.Module, places: Sequence[WatchedPlace]) -> None:
        """Watch the attributes with which a block was called, and other places.

        Args:
            index: The block's place.
            block: The block.
            places: What it can change and read besides.
        """
        self._attributes[index] = block, _constants_of(block)
        self._places[index] = [(place, *place.now()) for place in places]

    def check(self) -> None:
        """Check that a block would meet the same now as when it was called.

        Raises:
            RuntimeError: If not.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(
                "A tensor that a block was called with was changed in place before the last block"
                f" was called, and {_LATER} Give each block a tensor of its own, such as a clone."
            )
        for index, (block, before) in self._attributes.items():
            now = _constants_of(block)
            changed = [name for name in before if now.get(name) not in (before[name],)]
            changed += [p.place.name for p, *seen in self._places[index] if p.has_changed(*seen)]
            if changed:
                raise RuntimeError(
                    f"Block {index} had another value of {', '.join(changed)} when it was called"
                    f" than when the last block was called, and {_LATER} Don't change it in the"
                    " loop after the block's call, or give it to the block as an argument."
                )


def _constants_of(block: nn.Module) -> dict[str, Any]:
    """The plain values among a block's attributes, its training mode too."""
    attributes = vars(block).items()
    return {
        name: value
        for name, value in attributes
        if type(value) in (bool, int, float, str) and not name.startswith("_")
    }
