"""A model summary with the sizes and operations of the whole model, though a stage holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lightning_gpipe.model.on_meta import UntraceableLayer, run_on_meta
from lightning_gpipe.strategy import patches


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
    with ExitStack() as undo:

        def forward(*args: Any, **kwargs: Any) -> Any:
            undo.close()
            try:
                with as_written():
                    return run_on_meta(module, *args, **kwargs)
            except UntraceableLayer as error:
                warn(f"The summary has no sizes of layers, because {error}.")
                return None

        undo.enter_context(patches.MODULE_FORWARD.replaced(forward, module))
        yield
