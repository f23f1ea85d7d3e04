"""What a model's loop over its blocks meets in their place in the pipeline."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from types import FrameType
from typing import Any

from torch import nn

_UNCALLABLE = (nn.ModuleList, nn.ModuleDict)
_CALL = nn.Module._call_impl.__code__


class _OfClass(type):
    """The class of stand-ins for blocks of a class, to which it is equal."""

    of: type

    def __eq__(cls, other: object) -> bool:
        return cls.of is (other.of if isinstance(other, _OfClass) else other)

    def __hash__(cls) -> int:
        return hash(cls.of)


class StandIn:
    """A block as the model's loop meets it in the pipeline: of its class, with its attributes.

    Args:
        block: The block.
        call: Called with the arguments in its place.
    """

    __slots__ = ("__weakref__", "_block", "_call")  # tools keep modules as weak keys

    def __init__(self, block: Any, call: Callable[[Any, Any], Any]) -> None:
        object.__setattr__(self, "_block", block)
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call in the block's place."""
        return self._call(args, kwargs)

    @property
    def forward(self) -> Callable[..., Any]:
        """The same, as some models call their blocks; the block's own in calls of the block."""
        block, call = self._block, self._call
        own = block.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if _is_called(block) else call(args, kwargs)

        return forward

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._block, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._block, name)

    def __repr__(self) -> str:
        return repr(self._block)

    def __eq__(self, other: object) -> bool:
        return self._block is (other._block if isinstance(other, StandIn) else other)

    def __hash__(self) -> int:
        return hash(self._block)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self._block,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._block, memo)


def _is_called(module: nn.Module) -> bool:
    """Whether a call of a module runs, as of one whose forward somebody has wrapped."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            return True
        frame = frame.f_back
    return False


class ContainerStandIn(StandIn):
    """A block that is a container of layers itself.

    Args:
        block: The block.
        call: Called with the arguments in its place.
        part: Gives what stands in for a part of it, by its name; None: the parts themselves.
    """

    __slots__ = ("_part",)

    def __init__(
        self,
        block: Any,
        call: Callable[[Any, Any], Any],
        part: Callable[[str, Any], Any] | None = None,
    ) -> None:
        super().__init__(block, call)
        object.__setattr__(self, "_part", part)

    def __iter__(self) -> Iterator[Any]:
        if self._part is None or hasattr(self._block, "keys"):
            return iter(self._block)
        return iter([self._part(name, one) for name, one in self._block._modules.items()])

    def __len__(self) -> int:
        return len(self._block)

    def __bool__(self) -> bool:
        return bool(self._block)

    def __getitem__(self, index: Any) -> Any:
        if self._part is None:
            return self._block[index]
        if hasattr(self._block, "keys"):
            return self._part(index, self._block[index])
        return list(self)[index]

    def __contains__(self, item: object) -> bool:
        return item in self._block

    def __getattr__(self, name: str) -> Any:
        if self._part is not None and name in ("values", "items"):
            found = [(key, self._part(key, one)) for key, one in self._block.items()]
            return lambda: [one if name == "values" else (key, one) for key, one in found]
        return super().__getattr__(name)


class StandIns(list[Any]):
    """Stand-ins of the blocks, or of a slice of them.

    Args:
        stand_ins: They.
        loop_over: Listens to loops over them.
    """

    def __init__(
        self, stand_ins: Sequence[Any], loop_over: Callable[[Sequence[Any]], Iterator[Any]]
    ) -> None:
        super().__init__(stand_ins)
        self._loop_over = loop_over

    def __iter__(self) -> Iterator[Any]:
        return self._loop_over([*super().__iter__()])

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return StandIns(found, self._loop_over) if isinstance(index, slice) else found


def stand_in(
    block: Any,
    call: Callable[[Any, Any], Any],
    part: Callable[[str, Any], Any] | None = None,
) -> StandIn:
    """What stands in for a block; iterable where the block is.

    Args:
        block: The block.
        call: Called with the arguments in its place.
        part: Gives what stands in for a part of one that can't be called itself.
    """
    kind: Any = type(block)
    if not hasattr(kind, "__iter__"):
        made: StandIn = _class_of(StandIn, kind)(block, call)
        return made
    made = _class_of(ContainerStandIn, kind)(block, call, part if kind in _UNCALLABLE else None)
    return made


@cache
def _class_of(base: type[StandIn], kind: type) -> Any:
    """The class of stand-ins for blocks of a class: models may look at its name."""
    names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return _OfClass(kind.__name__, (base,), {**names, "of": kind})
