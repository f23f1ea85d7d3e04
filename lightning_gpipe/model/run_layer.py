"""How a layer of a backbone is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

#: Runs the layer with an index in the backbone on what the one before returned.
RunLayer: TypeAlias = Callable[[int, Callable[..., Any], Any], Any]


def run_layer(index: int, layer: Callable[..., Any], value: Any) -> Any:
    """Run a layer of an ``nn.Sequential``: on what the one before returned, and nothing else."""
    return layer(value)
