"""Runs code that is compiled as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Uncompiled:
    """A context in which what ``torch.compile`` has compiled runs as it is written.

    A step's functions are followed one by one over the stages, and compiled code shows none.
    """

    def __init__(self) -> None:
        self._stance: Any = None

    def __enter__(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *error: Any) -> None:
        self._stance.__exit__(*error)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run code inside this context that isn't followed, compiled where it is."""
        self._stance.__exit__(None, None, None)
        try:
            yield
        finally:
            self._stance.__enter__()
