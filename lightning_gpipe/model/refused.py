"""Refusals that code of the user's has caught, and gone on: they are told of all the same."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lightning_gpipe.model.notes import add_note
from lightning_gpipe.model.own_state import OTHERS, package

_FEW = 8
_TEXT = "Code of the module has caught this error, and what it has put in place counts: {}"
_caught: dict[str, None] = {}


class Refused(RuntimeError):
    """Code reads what another stage has."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if len(_caught) < _FEW and _is_asked_by_user(sys._getframe(1)):
            _caught[text] = None


@contextmanager
def noted() -> Iterator[None]:
    """Forget what came before a run, and warn at its end."""
    _caught.clear()
    try:
        yield
    finally:
        if isinstance(sys.exc_info()[1], Refused):  # it ends the run
            _caught.clear()
        _tell()


@contextmanager
def told_of() -> Iterator[None]:
    """Warn at the end of what code has caught until then; another error gets it as a note."""
    try:
        yield
    except StopIteration:  # a step has read its last batch
        _tell()
        raise
    except Exception as error:
        if not isinstance(error, Refused) and _caught:
            add_note(error, _TEXT.format(next(iter(_caught))))
        _caught.clear()
        raise
    _tell()


def _tell() -> None:
    """Warn of what code has caught."""
    texts = [*_caught]
    _caught.clear()
    for text in texts:
        warnings.warn(_TEXT.format(text), stacklevel=3)


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether code that is nobody else's has called what raises, before any of Lightning's."""
    while frame is not None:
        name = package(frame.f_globals.get("__name__", ""))
        if name == "lightning":
            return False
        if name not in OTHERS:
            return True
        frame = frame.f_back
    return False
