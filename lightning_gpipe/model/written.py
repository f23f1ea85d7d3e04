"""Which tensors a function changes, and of which others these are views."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.model.elsewhere import writes
from lightning_gpipe.model.remote import origin_of, tensors_in

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Views:
    """Views that a step has made of tensors that every stage has, while both live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}  # by id

    def note(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note views that a function has made: who changes them changes what they are of, too.

        Args:
            func: The function.
            given: The tensors that it was given.
            made: Those that it has made.
        """
        for view in made:
            if given and view is not given[0] and (view._is_view() or func == _GET_DATA):
                base = self.base_of(given[0])
                bases = weakref.ref(given[0] if base is None else base)
                self._known[id(view)] = weakref.ref(view), bases

    def base_of(self, tensor: Tensor) -> Tensor | None:
        """What a tensor is a view of; None if it isn't known to be one."""
        view, base = self._known.get(id(tensor), (None, None))
        return base() if view is not None and base is not None and view() is tensor else None

    def clear(self) -> None:
        """Forget them."""
        self._known.clear()

    def written(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """What a function changes: its first argument or ``out``, and what these are views of.

        Args:
            name: The function's.
            args: What it is given.
            kwargs: The same.
        """
        out = kwargs.get("out")
        if out is not None:
            changed = tensors_in(out)
        elif writes(name):
            changed = tensors_in(args[0] if args else next(iter(kwargs.values())))
        else:
            return []
        bases = (self.base_of(tensor) for tensor in changed)
        return [*changed, *(base for base in bases if base is not None and origin_of(base) is None)]
