"""Refuses what layers tell each other past their inputs and outputs, where stages lie between.

An object, a list, a global or a buffer of a module that layers share is one thing in one process.
Where the layers are on several stages, each has a copy: what one layer leaves in it, another one
doesn't find, and computes with what was there before. Where all of those stages change it, such as
a table that each makes when it first needs it, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lightning_gpipe.comm.groups import Groups
from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.model.layer_state import is_held, is_own, places_of, shared_places
from lightning_gpipe.model.notes import add_note
from lightning_gpipe.model.partition import Partition
from lightning_gpipe.model.places import Contents, Place, has_changed

_ALWAYS = 16  # forwards, and calls of the backbone by a step, up to which all are looked at


class SharedState:
    """Watches what layers of several virtual stages can change.

    Args:
        layers: The layers of the backbone.
        places: What layers share, in the same order on every rank; None: this rank has no such.
        parts: For each layer its virtual stage.
        own: The virtual stages of this rank.
        groups: The process groups.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        places: Sequence[Place | None],
        parts: Sequence[int],
        own: Sequence[int],
        groups: Groups,
    ) -> None:
        self._layers, self._places, self._groups = layers, places, groups
        self._parts = [{parts[i] for i in place.layers} if place else set() for place in places]
        self._forwards = dict.fromkeys(own, 0)  # of each virtual stage of this rank
        self._changed = set[int]()  # the places that any of them has changed
        self._calls = 0
        # where a rank has several virtual stages, what layers can read that run outside their step
        apart = [] if len(own) == 1 else own if groups.stage else own[1:]
        outside = [i for i, part in enumerate(parts) if part in apart]
        found = {id(p.value): (i, p) for i in outside for p in places_of(layers[i]) if is_held(p)}
        self._outside = [*found.values()]
        self._met: list[Contents] | None = None  # there, at the last forward of this mini-batch

    @classmethod
    def of(cls, layers: Sequence[nn.Module], partition: Partition, groups: Groups) -> SharedState:
        """Find what layers share. Collective over all ranks."""
        parts = [part for part, indices in enumerate(partition.parts) for _ in indices]
        found: Mapping[str, Place] = shared_places(layers, parts) if max(parts) else {}
        names = groups.decide("shared state", lambda: [*found]) if max(parts) else []
        own = range(groups.stage, len(partition.parts), groups.stages)
        return cls(layers, [found.get(name) for name in names], parts, own, groups)

    def watched(self, part: int) -> AbstractContextManager[None]:
        """Note what changes inside this context, which is entered at once.

        Args:
            part: The virtual stage whose layers run.
        """
        if not self._places and not self._outside:
            return nullcontext()
        self._forwards[part] += 1
        watches = bool(self._places) and _is_looked_at(self._forwards[part])
        meets = bool(self._outside) and _is_looked_at(self._calls + 1)
        return self._watched(part, watches, meets) if watches or meets else nullcontext()

    @contextmanager
    def _watched(self, part: int, watches: bool, meets: bool) -> Iterator[None]:
        with self._places_watched(part) if watches else nullcontext():
            yield
        if meets:
            self._met = self._meets()

    @contextmanager
    def _places_watched(self, part: int) -> Iterator[None]:
        pairs = zip(self._places, self._parts, strict=True)
        before = [place.contents() if place and part in users else None for place, users in pairs]
        try:
            yield
        except (AttributeError, LookupError, TypeError) as error:
            self._explain(error, part)
            raise
        for index, (place, old) in enumerate(zip(self._places, before, strict=True)):
            if place and old is not None and has_changed(old, place.contents()):
                self._changed.add(index)

    def step_calls(self) -> None:
        """Look at what a step that runs once per micro-batch has set, when it calls the backbone.

        Raises:
            RuntimeError: If it has set something that layers read which don't run then.
        """
        if not (self._outside and _is_looked_at(self._calls + 1)):
            return
        before, self._met = self._met, self._meets()
        for (index, place), old, now in zip(self._outside, before or (), self._met, strict=False):
            if has_changed(old, now):
                raise RuntimeError(
                    f"The step sets {place.name} (of type {place.kind}), and layer {index}"
                    f" ({type(self._layers[index]).__name__}) of the backbone, which may read it,"
                    " runs before or after the step where a stage has several virtual ones: set it"
                    " in on_train_batch_start, give it to the backbone as an input, or use"
                    " virtual_stages=1."
                )

    def _meets(self) -> list[Contents]:
        return [place.contents(buffers=False) for _, place in self._outside]

    def check(self) -> None:
        """Compare what stages have changed, after a call of the backbone. Collective, at times.

        Raises:
            RuntimeError: If some stages have changed what others share, and didn't change.
        """
        self._calls, self._met = self._calls + 1, None
        if not self._places or not is_due(self._calls):  # all stages wait for each other
            return
        own = [part for part, forwards in self._forwards.items() if forwards]
        flags = torch.zeros(2, len(self._places), dtype=torch.uint8, device="cpu")
        for index, users in enumerate(self._parts):  # a table that one makes those of a rank have
            flags[0, index] = index in self._changed
            flags[1, index] = index not in self._changed and not users.isdisjoint(own)
        both = self._groups.pipeline.reduce_in_host(flags, dist.ReduceOp.MAX).all(0).tolist()
        if any(both):
            raise RuntimeError(self._problem(both.index(True)))

    def _explain(self, error: Exception, part: int) -> None:
        """Tell what a layer that failed may have missed."""
        pairs = zip(self._places, self._parts, strict=True)
        names = [place.name for place, users in pairs if place and is_own(place) and part in users]
        if names:
            add_note(
                error,
                f"Layers of this stage share {', '.join(names[:3])} with layers of other stages."
                f" What those leave there isn't here.{_REMEDY}",
            )

    def _problem(self, index: int) -> str:
        place = self._places[index]
        if place is None:
            return f"Layers of several stages share something that this rank hasn't.{_REMEDY}"
        first, *others = place.layers
        names = f"{first} ({type(self._layers[first]).__name__}) and {others[-1]}"
        return (
            f"Layers {names} of the backbone share {place.name} (of type {place.kind}), and one of"
            f" them changes it, but they are on different stages, which don't see it.{_REMEDY}"
        )


_REMEDY = (
    " Return what later layers need with the layers' outputs, as tensors of shape [batch, ...], or"
    " keep these layers on one stage: GPipeStrategy(balance=[...])."
)


def _is_looked_at(number: int) -> bool:
    """The first ones, and then less and less often."""
    return number <= _ALWAYS or is_due(number)
