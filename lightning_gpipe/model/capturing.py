"""What Hugging Face's models record of their blocks, by hooks, which a pipeline doesn't call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from lightning_gpipe.model.promise import Unknown

_REMEDY = "leave out output_hidden_states, output_attentions and output_router_logits."


class Unrecorded(Unknown):
    """Stands for a hidden state that a model records: it may not be used."""

    __slots__ = ()

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Tell why it can't be used."""
        raise RuntimeError(
            "The model records hidden_states of its blocks, which are spread over stages, and uses"
            f" them: {_REMEDY} A model whose head is made of them can't be cut there."
        )


@contextmanager
def not_capturing(first: nn.Module, blocks: int) -> Iterator[None]:
    """Let nothing be recorded of what blocks do inside.

    Of hidden states there are :class:`Unrecorded` ones behind, which many a model asks for and
    drops. What is recorded of the blocks' parts is refused: nothing could stand for it.

    Args:
        first: The first block.
        blocks: How many there are.

    Raises:
        RuntimeError: If something else is recorded than what blocks return.
    """
    collector = _collector()
    recorded = collector.get() if collector is not None else None
    if not recorded:
        yield
        return
    kept = {key for key in recorded if not key.startswith("_")}  # the others choose among them
    if kept != {"hidden_states"} or not _is_recorded(first):
        raise RuntimeError(
            f"The model records {', '.join(recorded)} of its blocks, which are spread over stages:"
            f" {_REMEDY}"
        )
    with unrecorded():
        yield
    recorded["hidden_states"] += [Unrecorded() for _ in range(blocks + 1)]  # the input's, too


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing inside this context."""
    collector = _collector()
    token = collector.set(None) if collector is not None else None
    try:
        yield
    finally:
        if collector is not None:
            collector.reset(token)


def _collector() -> Any:
    """Where models say what is recorded of the running call; None: nobody records."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    return getattr(capturing, "_active_collector", None)


def _is_recorded(block: nn.Module) -> bool:
    """Whether a hook of the block itself records what it returns."""
    hooks = block._forward_hooks.values()
    return any("output_capturing_hook" in getattr(hook, "__qualname__", "") for hook in hooks)
