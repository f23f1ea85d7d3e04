"""How long this thread has waited for messages."""

from __future__ import annotations

import threading
from time import perf_counter


class _Waiting(threading.local):
    """Adds up the time that passes inside its contexts, which don't nest. One for each thread.

    The processor's time of a thread would tell the same, but asking the system for it gives other
    threads of the machine the occasion to come first, for a millisecond at times.
    """

    seconds = 0.0
    _since = 0.0

    def __enter__(self) -> None:
        self._since = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._since


#: Wait for messages inside this context.
waiting = _Waiting()
