"""Checkpoints that can't be read."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class DamagedCheckpoint(ValueError):
    """A checkpoint's file, or one of its files, holds something else than was written."""


@contextmanager
def reading(path: Any) -> Generator[None, None, None]:
    """Name the checkpoint where PyTorch fails to read it, and say what to do.

    Args:
        path: Its name.

    Raises:
        DamagedCheckpoint: For errors that aren't the file system's.
    """
    try:
        yield
    except DamagedCheckpoint:
        raise
    except Exception as error:
        is_systems = isinstance(error, OSError) and error.errno != errno.EINVAL  # a cut file's
        if is_systems or "Unsupported global" in str(error):  # weights_only=True, with a remedy
            raise
        text = str(error).partition("\n")[0].partition(". ")[0]
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise DamagedCheckpoint(
            f"The checkpoint {path} can't be read ({what}). It may be cut short by a full disk or a"
            " killed process, or be no checkpoint at all: resume from an earlier one."
        ) from error
