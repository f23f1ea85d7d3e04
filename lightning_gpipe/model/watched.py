"""Places that must stay as they are while a model's loop runs over its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_gpipe.model.places import Place, has_buffers, has_changed
from lightning_gpipe.model.snapshot import Snapshot


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
