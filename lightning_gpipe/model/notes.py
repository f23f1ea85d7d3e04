"""Notes of errors, which Python has from 3.11 on."""

from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """Add to an error what helps to understand it.

    With Python 3.10 a traceback doesn't show it, but what ranks tell of a failure does.
    """
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), text]
