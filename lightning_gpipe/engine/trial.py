"""Trials: an error on one stage fails all stages alike, and they go on from there.

A search for the largest batch runs out of memory on purpose. What fails does so on one stage, while
the others wait for its messages. So in a trial a stage that fails goes on through its program: in
the place of its tensors it hands on that it has failed, and who gets that does the same. At the end
of a call all stages compare, and raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.tensors.tree import Tree

IsSpared: TypeAlias = Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands for the tensors of a stage that has failed."""

    text: str


class Trial:
    """Whether a trial runs, and has failed.

    Args:
        channel: The pipeline's object channel.
    """

    def __init__(self, channel: ObjectChannel) -> None:
        self._channel = channel
        self._is_spared: IsSpared | None = None
        self._failure: RuntimeError | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a stage has failed since all compared."""
        return self._failure is not None

    @contextmanager
    def running(self, is_spared: IsSpared) -> Iterator[None]:
        """Run trials inside this context.

        Args:
            is_spared: Whether all can go on from an error; must say the same on every stage.
        """
        self._is_spared = is_spared
        try:
            yield
        finally:
            self._is_spared = self._failure = None

    def spares(self, error: BaseException) -> bool:
        """Whether an error is one that a trial may have."""
        return self._is_spared is not None and self._is_spared(error)

    def end(self) -> None:
        """Let every error be the run's from here on: one came where stages can't compare."""
        self._is_spared = None

    def attempt(self) -> AbstractContextManager[None]:
        """Keep an error for the comparison, in a trial."""
        return nullcontext() if self._is_spared is None else self._attempt()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not self.spares(error):
                raise
            self._failure = self._failure or error

    def take(self, tree: Tree) -> Tree:
        """What a stage has got, which may be that another one has failed."""
        for leaf in tree.leaves:
            if isinstance(leaf, _Failed):
                self._failure = self._failure or RuntimeError(leaf.text)
        return tree

    def failed(self) -> Tree:
        """What a stage hands on that has failed."""
        return Tree([_Failed(str(self._failure))], Tree.of(None, "Nothing").spec)

    def compare(self) -> None:
        """Fail on all stages, if one has failed. Collective over the pipeline in a trial."""
        if self._is_spared is None:
            return
        own, self._failure = self._failure, None
        text = str(own) if own is not None else None
        texts = self._channel.gather("trial", text)
        if own is not None:
            raise own
        for text in texts:
            if text is not None:
                raise RuntimeError(text)

    def shared(self) -> AbstractContextManager[None]:
        """Share an error inside with all stages. Collective over the pipeline in a trial."""
        return nullcontext() if self._is_spared is None else self._shared()

    @contextmanager
    def _shared(self) -> Iterator[None]:
        with self.attempt():
            yield
        self.compare()
