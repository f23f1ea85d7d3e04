"""Starting processes by scripts, spawn and fork, and what becomes of the others when one ends."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from lightning_gpipe.strategy import _lightning

PATIENCE_S = 8.0  # for all processes to say why they end, before those left are killed


class ScriptLauncher(_lightning.ScriptLauncher):
    """Lightning's, which kills all processes when it sees that one failed: but not at once."""

    @override
    def _call_children_scripts(self) -> None:
        super()._call_children_scripts()
        seen: list[Any] = [PatientlySeen(process) for process in self.procs]
        self.procs[:] = seen


class PatientlySeen:
    """A child process that seems to run until the others have had time to hear of its failure.

    Args:
        process: The child.
    """

    def __init__(self, process: Any) -> None:
        self.returncode: int | None = None
        self._process = process
        self._failed: float | None = None

    def poll(self) -> int | None:
        """Look whether the process has ended; see ``subprocess.Popen``."""
        code: int | None = self._process.poll()
        if code:
            self._failed = self._failed or time.monotonic()
            if time.monotonic() - self._failed < PATIENCE_S:
                return None
        self.returncode = code
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


class MultiProcessingLauncher(_lightning.MultiProcessingLauncher):
    """Lightning's, whose children handle no errors: they report theirs before they end."""

    @override
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            self._strategy.on_exception(error)
            raise
