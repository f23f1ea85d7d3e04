"""Layers that a model calls in a loop, with more than one argument: a Transformer's blocks."""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

from torch import nn

from lightning_gpipe.model.listener import Listener, Listening
from lightning_gpipe.model.stand_in import StandIns


class Blocks(Listening, nn.ModuleList):
    """A backbone of blocks that a model calls one after another, with masks, positions and so on.

    A run makes one of the ``nn.ModuleList`` in which the model keeps them. Make it yourself to say
    ``as_tuple``, or which of several lists is the backbone::

        model.transformer.h = Blocks(model.transformer.h, as_tuple=True)

    The model's code stays as it is, and so do the names of its parameters. Each block must get a
    hidden state: what the one before returned, or what was made of it by functions that work sample
    by sample, such as activations, dropout, residual sums and ``nn.LayerNorm``. A block may be an
    ``nn.ModuleList`` or ``nn.ModuleDict``, whose modules the model calls. Blocks may be skipped, as
    LayerDrop does. Hidden states that are used otherwise between them are an error. The first block
    gets it as ``hidden_states``, or as the first of its arguments that is a tensor. What else those
    before returned, in a tuple, can be an argument, too. Other arguments may
    differ from block to block. Those whose first dimension is the batch's are split into
    micro-batches; others, such as positions ``[1, length]``, go to every micro-batch whole.

    Outside the pipeline it is an ``nn.ModuleList``, and so is a copy.

    Args:
        blocks: Called as ``block(hidden, *extra, **more)``; hidden ``[batch, …]``.
        as_tuple: Whether a block returns a tuple, of which the model takes the first element; None:
            find it out. Unless it is False, a run of the first block without data tells how long
            the tuple is.

    Raises:
        ValueError: If ``as_tuple`` is something else.
    """

    def __init__(self, blocks: Iterable[nn.Module], as_tuple: bool | None = None) -> None:
        super().__init__(blocks)
        if not (as_tuple is None or isinstance(as_tuple, bool)):
            raise ValueError(f"as_tuple must be None, True or False, got as_tuple={as_tuple!r}.")
        self.as_tuple = as_tuple


class Sequential(Listening, nn.Sequential):
    """An ``nn.Sequential`` that a model may also call in a loop, layer by layer.

    It is one that a pipeline has taken over, bears its name in summaries, and its copies are ones.
    """

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if not isinstance(index, slice):
            return found
        return nn.Sequential(OrderedDict(zip([*self._modules][index], found, strict=True)))

    def _gives_layers(self, listener: Listener) -> bool:
        return listener.is_alone and not listener.is_looped_over  # by which loops tell blocks apart

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Sequential, (), self.state_without()


class ModuleDict(Listening, nn.ModuleDict):
    """An ``nn.ModuleDict`` over whose keys, values or items a model loops, in their order.

    It is one that a pipeline has taken over, bears its name in summaries, and its copies are ones.
    """

    def __iter__(self) -> Iterator[str]:
        listener, keys = self._listener, list(self._modules)
        return iter(keys) if listener is None else listener.loop_over(self, keys)

    def __getitem__(self, key: str) -> Any:
        layer, listener = super(Listening, self).__getitem__(key), self._listener
        if listener is None:
            return layer
        return listener.stand_in(self, list(self._modules).index(key), "", layer)

    def keys(self) -> Any:
        """The layers' names."""
        listener = self._listener
        if listener is None:
            return super().keys()
        return StandIns([*self._modules], partial(listener.loop_over, self))

    def values(self) -> Any:
        """The layers, or what stands in for them."""
        listener = self._listener
        return super().values() if listener is None else self._stand_ins(listener)

    def items(self) -> Any:
        """The same with their keys."""
        listener = self._listener
        if listener is None:
            return super().items()
        found = list.__iter__(self._stand_ins(listener))
        pairs = [*zip(self._modules, found, strict=True)]
        return StandIns(pairs, partial(listener.loop_over, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.ModuleDict, (), self.state_without()


class _OfUser(Listening):
    """The first base of what is made of a user's class; its copies are of that class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, kind = copyreg.__newobj__, type(self).__bases__[1]  # type: ignore[attr-defined]
        return made, (kind,), self.state_without()


_TAKEN_OVER: dict[type[nn.Module], type[Listening]] = {
    nn.ModuleList: Blocks,
    nn.Sequential: Sequential,
    nn.ModuleDict: ModuleDict,
}


@cache
def listening(kind: Any) -> type[Listening] | None:
    """What a pipeline makes of a backbone of a class while it has it.

    Args:
        kind: The class; an ``nn.Sequential`` with a forward of its own loops over itself.

    Returns:
        The class that it gets; None: it stays as it is.
    """
    if kind in _TAKEN_OVER or issubclass(kind, Listening):
        return _TAKEN_OVER.get(kind)
    for base in (nn.ModuleList, nn.Sequential):
        is_called = base is nn.Sequential and kind.forward is base.forward
        names = "__iter__", "__getitem__", "__reversed__"
        is_plain = all(getattr(kind, n, None) is getattr(base, n, None) for n in names)
        if issubclass(kind, base) and is_plain and not is_called:
            attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            return type(kind.__name__, (_OfUser, kind), attributes)
    return None


def loops_over_itself(module: nn.Module) -> bool:
    """Whether it is a list, or a sequence with a forward of its own, that can be listened to."""
    kind: Any = type(module)
    is_called = isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward
    is_own = isinstance(module, Listening) or listening(kind) is not None
    return not is_called and is_own
