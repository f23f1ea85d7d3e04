"""Which tensors of a step may be of the same memory."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from lightning_gpipe.model.ran import Ran

#: Functions whose result may be another tensor of the memory of the first one that they are given.
_VIEWS = {"detach", "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "select"}
_VIEWS |= {"__get__", "__getitem__", "unbind", "view_as", "to", "as_tensor", "asarray"}


class Aliases:
    """Tensors of the same memory, as far as the functions of a step tell.

    Stages without the values find the same, where no memory tells.
    """

    def __init__(self) -> None:
        # by id, each with what those of the same memory have in common
        self._found: dict[int, tuple[weakref.ref[Tensor], object]] = {}

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._found.clear()

    def note(self, ran: Ran) -> None:
        """Note what a function has made of tensors. Parameters may get no weak references."""
        if ran.name in _VIEWS and ran.given and not isinstance(ran.given[0], nn.Parameter):
            common = self._common(ran.given[0]) or object()
            self._found.update((id(t), (weakref.ref(t), common)) for t in (ran.given[0], *ran.made))

    def of(self, tensor: Tensor) -> set[int]:
        """The ids of a tensor and those of its memory."""
        common, found = self._common(tensor), self._found.items()
        alive = {i for i, (ref, other) in found if other is common and ref() is not None}
        return alive | {id(tensor)}

    def _common(self, tensor: Tensor) -> object | None:
        ref, common = self._found.get(id(tensor), (None, None))
        return common if ref is not None and ref() is tensor else None
