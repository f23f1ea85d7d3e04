"""Starting processes by spawn and fork, and ending them."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_gpipe import _lightning


class MultiProcessingLauncher(_lightning.MultiProcessingLauncher):
    """Lightning's, whose children handle no errors: they report theirs before they end."""

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise
