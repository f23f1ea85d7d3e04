"""What a step computes of samples one by one, in a loop over the rows of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import ref

from torch import Tensor

from lightning_gpipe.model.arithmetic import ADD
from lightning_gpipe.model.ran import Ran
from lightning_gpipe.strategy.step_rows import takes_one

#: Functions that put together what was computed of samples one by one.
_TOGETHER = {"cat", "concat", "concatenate", "hstack", "stack", "vstack"}
_NOTHING: frozenset[int] = frozenset()


class OneByOne:
    """The tensors that a step has computed of the row of a sample, or added up of such.

    Args:
        is_constant: Tells of tensors that are made of no others: sums begin with one.
    """

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        self._is_constant = is_constant
        self._of: dict[int, tuple[ref[Tensor], frozenset[int]]] = {}  # which samples, by id

    def clear(self) -> None:
        """Forget them."""
        self._of.clear()

    def follow(self, ran: Ran, samples: int, is_of_more: bool) -> int:
        """Note what a function has made.

        Args:
            ran: The function.
            samples: Of the micro-batch.
            is_of_more: Whether it was given what is known to be of several samples.

        Returns:
            Of how many samples this is a sum; 1: it is computed of one, or of several otherwise; 0:
            of rows of all of them, as far as is known.
        """
        parts = [self._samples_of(tensor) for tensor in ran.given] if self._of else []
        of = _NOTHING.union(*parts)
        if not of:
            if not takes_one(ran, samples):
                return 0
            self._note(ran.made, (frozenset([i]) for i in _places(ran, samples)))
            return 1
        if len(of) == 1 and ran.name not in _TOGETHER and not is_of_more:
            self._note(ran.made, [of] * len(ran.made))
            return 1
        pairs = zip(ran.given, parts, strict=True)
        are_parts = all(part or self._is_constant(tensor) for tensor, part in pairs)
        if ran.name not in ADD or not are_parts:
            return 1
        self._note(ran.made, [of])
        return len(of)

    def _samples_of(self, tensor: Tensor) -> frozenset[int]:
        found, of = self._of.get(id(tensor), (None, _NOTHING))
        return of if found is not None and found() is tensor else _NOTHING

    def _note(self, made: Iterable[Tensor], of: Iterable[frozenset[int]]) -> None:
        self._of.update((id(t), (ref(t), each)) for t, each in zip(made, of, strict=False))


def _places(ran: Ran, samples: int) -> list[int]:
    """Of which samples what a function has taken is."""
    if ran.name == "unbind":
        return list(range(samples))
    where = (*ran.args[1:], *ran.kwargs.values())
    index = where[0][0] if isinstance(where[0], tuple) else where[-1]
    return [index % samples] if type(index) is int else [id(index)]
