"""The state of the random generators from which the user's code draws, the same on every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_gpipe.comm.looks import is_due
from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.tensors.random_state import RandomState, packed, set_packed


class States(NamedTuple):
    """What generators are like.

    Args:
        common: torch's, Python's and NumPy's.
        own: Those that the user's code holds, by what tells them apart.
    """

    common: RandomState
    own: dict[Any, bytes]


class SharedGenerators:
    """Lets all stages go on from the first one's generators. States travel when one has moved.

    Args:
        channel: The pipeline's object channel.
    """

    def __init__(self, channel: ObjectChannel) -> None:
        self.channel = channel
        self._known: States | None = None  # what all stages had last
        self._own: Mapping[Any, Any] = {}
        self._find: Callable[[], Mapping[Any, Any]] = dict
        self._steps = 0

    @contextmanager
    def with_own(self, find: Callable[[], Mapping[Any, Any]]) -> Iterator[None]:
        """Share those that the user's code holds, too, inside this context. Collective.

        Args:
            find: Returns them, by what tells them apart on every stage.
        """
        if self.channel.is_alone:
            yield
            return
        self._find, self._steps = find, 0
        try:
            self.share()
            yield
        finally:
            self._find, self._own, self._known = dict, {}, None

    def news(self) -> States | None:
        """The first stage's state; None if all stages know it."""
        own = {key: packed(generator) for key, generator in self._own.items()}
        state = States(RandomState.current(self.channel.device), own)
        known = self._known
        if known is not None and state.common.equals(known.common) and own == known.own:
            return None
        self._known = state
        return state

    def take(self, news: States | None) -> None:
        """Go on from the first stage's state.

        Args:
            news: What :meth:`news` gave there.
        """
        self._known = news or self._known
        if self._known is None:
            return
        self._known.common.restore(self.channel.device)
        for key, state in self._known.own.items():
            if key in self._own:
                set_packed(self._own[key], state)

    def look(self) -> None:
        """Look for the user's own again: an epoch may begin with others."""
        self._own = self._find()

    def share(self) -> None:
        """Go on from the first stage's state: code may have drawn on one rank alone. Collective."""
        if self.channel.is_alone:
            return
        self._steps += 1
        if is_due(self._steps):  # code may hold others than at the beginning
            self.look()
        if self.channel.index == 0:
            self.channel.broadcast("generators", self.news(), source=0)
        else:
            self.take(self.channel.broadcast("generators", None, source=0))
