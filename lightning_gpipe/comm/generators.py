"""The state of the random generators from which the user's code draws, the same on every stage."""

from __future__ import annotations

from lightning_gpipe.comm.messages import ObjectChannel
from lightning_gpipe.tensors.random_state import RandomState


class SharedGenerators:
    """Lets all stages go on from the first one's generators. The state travels when it has moved.

    Args:
        channel: The pipeline's object channel.
    """

    def __init__(self, channel: ObjectChannel) -> None:
        self.channel = channel
        self._known: RandomState | None = None  # what all stages had last

    def news(self) -> RandomState | None:
        """The first stage's state; None if all stages know it."""
        state = RandomState.current(self.channel.device)
        if self._known is not None and state.equals(self._known):
            return None
        self._known = state
        return state

    def take(self, news: RandomState | None) -> None:
        """Go on from the first stage's state.

        Args:
            news: What :meth:`news` gave there.
        """
        self._known = news or self._known
        if self._known is not None:
            self._known.restore(self.channel.device)

    def share(self) -> None:
        """Go on from the first stage's state: code may have drawn on one rank alone. Collective."""
        if self.channel.is_alone:
            return
        if self.channel.index == 0:
            self.channel.broadcast("generators", self.news(), source=0)
        else:
            self.take(self.channel.broadcast("generators", None, source=0))
