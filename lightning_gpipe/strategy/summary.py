"""A model summary with the sizes and operations of the whole model, though a stage holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from lightning_gpipe.model.on_meta import UntraceableLayer, run_on_meta


@contextmanager
def forward_on_meta(
    module: Any, as_written: Callable[[], AbstractContextManager[None]], warn: Callable[[str], Any]
) -> Iterator[None]:
    """Let a call of the module run all its layers on the meta device: sizes, but no values.

    A summary sees every layer once, with the whole example, on every stage alike.

    Args:
        module: The user's module; what it returns then means nothing.
        as_written: Makes the module's layers callable as without a pipeline.
        warn: Told why there are no sizes, where a layer needs values.
    """
    if getattr(module, "example_input_array", None) is None:
        yield
        return
    own = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        _set_forward(module, own)
        try:
            with as_written():
                return run_on_meta(module, *args, **kwargs)
        except UntraceableLayer as error:
            warn(f"The summary has no sizes of layers, because {error}.")
            return None

    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, own)


def _set_forward(module: nn.Module, forward: Any) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward
