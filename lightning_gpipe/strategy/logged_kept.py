"""Values that are logged and are those of one micro-batch, because attributes have kept them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

BY_LAYERS = (
    "The step logs {name!r}, which a layer or a hook has kept while the backbone ran, or which"
    " depends on that: it is one micro-batch's, and other stages haven't got it. Return it with the"
    " backbone's output, shape [batch, ...], and log what the step computes of that."
)
BY_STEPS = (
    "{name!r} is logged after the step, of an attribute that the step has set: with"
    " step='micro-batch' it is what the last micro-batch's has left there. Log it in the step, or"
    " return it from the step, for on_train_batch_end. What adds up, such as a count of samples, is"
    " right in spite of it."
)


class LoggedKept:
    """Warns of such values, once for each name, on the rank that logs one.

    Args:
        is_kept: Whether it is one.
        text: What to say of it.
    """

    def __init__(self, is_kept: Callable[[Any], bool], text: str) -> None:
        self._is_kept, self._text = is_kept, text
        self._told: set[str] = set()

    def look(self, name: str, value: Any) -> None:
        """Look at what ``self.log`` is given."""
        if name not in self._told and self._is_kept(value):
            self._told.add(name)
            warnings.warn(self._text.format(name=name), stacklevel=2)
