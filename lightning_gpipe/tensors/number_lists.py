"""Lists and tuples of numbers: it can't be told whether they have one for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_NUMBERS = (bool, int, float, complex, str, bytes)


def is_of_numbers(value: Any) -> bool:
    """Whether it is a list or tuple of numbers, strings or tensors of one element."""
    return type(value) in (list, tuple) and len(value) > 1 and all(map(_is_number, value))


def refusal(value: Any, what: str, more: str) -> ValueError:
    """The error of one that is as long as the batch.

    Args:
        value: The list or tuple.
        what: What holds it.
        more: What else its user may do.
    """
    kind = type(value).__name__
    return ValueError(
        f"{what} has a {kind} of {len(value)} numbers or strings, such as {value[0]!r}. It is as"
        f" long as the batch, so each may be one sample's, and a {kind} goes to every micro-batch"
        f" whole. If so, give a tensor of shape [batch, ...]{more}. If all samples have them in"
        f" common, give a torch.Size, or a tensor of shape [1, {len(value)}]."
    )


class NumberLists:
    """Refuses those in the inputs of a backbone that may have an entry per sample.

    One that was of another length than the batch at first is none, however long batches are later.
    """

    def __init__(self) -> None:
        self._others: set[tuple[Any, ...]] = set()

    def check(self, value: Any, samples: int) -> None:
        """Look at an input that is split.

        Args:
            value: The input.
            samples: How many it has.

        Raises:
            ValueError: If one is as long as the batch.
        """
        if isinstance(value, Tensor):
            return
        for path, found in _lists_in(value, ()):
            if len(found) != samples:
                self._others.add(path)
            elif path not in self._others:
                raise refusal(found, "The backbone's input", "")


def _lists_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if is_of_numbers(value):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in entries:
            yield from _lists_in(item, (*path, key))


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, Tensor) and value.numel() == 1)
