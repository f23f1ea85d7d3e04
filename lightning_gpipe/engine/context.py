"""What surrounds a forward, and surrounds its recompute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from lightning_gpipe.model.run_layer import RunLayer


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recompute must restore to draw the same random numbers and to round the same way.

    Args:
        key: Numbers that are the same on every stage and for every number of stages, and differ
            between calls.
        autocast: For each device type whether autocast is on, and its type.
        autocast_cache: Whether autocast keeps its casts.
        run_layer: How layers are run.
        default_dtype: The type of new tensors; Lightning's precision sets it for the step alone.
    """

    key: tuple[int, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    run_layer: RunLayer
    default_dtype: torch.dtype

    @classmethod
    def current(
        cls, key: tuple[int, ...], device: torch.device, run_layer: RunLayer
    ) -> ForwardContext:
        """The context of the running step."""
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        )
        cache = torch.is_autocast_cache_enabled()
        return cls(key, autocast, cache, run_layer, torch.get_default_dtype())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Autocast and the default type as they were in the forward."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache
                    )
                )
            yield
