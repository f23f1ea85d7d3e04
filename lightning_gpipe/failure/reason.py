"""Why a run ends, and which of several errors came first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.distributed import DistBackendError

from lightning_gpipe.comm.messages import RemoteError
from lightning_gpipe.failure.frames import place_in

#: What ends a run. ``lost``: the connection to another process; ``died``: a process ended without a
#: word; ``orphan``: the process that started this one is gone; ``stall``: all ranks wait for each
#: other.
FailureKind: TypeAlias = Literal["error", "interrupt", "stall", "died", "sigterm", "orphan", "lost"]

NO_RANK = -1
DIED = "its process died, as when it is killed or the machine is out of memory"
ORPHAN = "the process that started it is gone"

#: The cause of what happens at the same time comes first: a launcher sends SIGTERM to all others
#: when it sees that a process died, and a lost connection is the consequence of anything else.
_ORDER: dict[FailureKind, int] = {"died": 1, "orphan": 2, "sigterm": 2, "lost": 3}
_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|by peer", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[^\n\t -~\u00a0-\U0010ffff]")
_TEXT = 4000  # characters of an error
_LINE = 300  # characters of one that is told in a line


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends.

    Args:
        rank: The process where it began; -1: all of them.
        stage: Its pipeline stage.
        text: The error, as it can be printed.
        kind: What it is.
    """

    rank: int
    stage: int
    text: str
    kind: FailureKind = "error"

    @classmethod
    def of(
        cls, error: BaseException, rank: int, stages: int, kind: FailureKind | None = None
    ) -> Failure:
        """The failure that an exception on this rank is; of this kind, if the caller knows it."""
        return cls(rank, rank % stages, text_of(error), kind or kind_of(error))

    @property
    def order(self) -> int:
        """Where it stands among what happened at the same time; the cause comes first."""
        return _ORDER.get(self.kind, 0)

    @property
    def line(self) -> str:
        """The failure in one line."""
        lines = str(self).strip().splitlines()
        # an error of another process, such as a loader's worker, ends with what it is
        text = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
        return f"{text[:_LINE]} …" if len(text) > _LINE else text

    def __str__(self) -> str:
        if self.rank == NO_RANK:
            return self.text
        return f"Rank {self.rank} (stage {self.stage}) failed: {self.text}"


def kind_of(error: BaseException) -> FailureKind:
    """What ends a run where this exception arises."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    if isinstance(error, (RemoteError, DistBackendError)):
        return "lost"
    if isinstance(error, RuntimeError) and _LOST.search(text_of(error)) is not None:
        return "lost"
    return "error"


def text_of(error: BaseException) -> str:
    """An exception's type, message and notes, whatever is wrong with the message.

    Returns:
        At most 4,000 characters, without what would move a terminal's cursor.
    """
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message can't be read: {type(another).__name__})"
    for note in getattr(error, "__notes__", ()):  # such as in which layer
        message = f"{message.rstrip('. ')}. {note}" if message else str(note)
    if len(message) > _TEXT:
        message = f"{message[: _TEXT // 2]} […] {message[-_TEXT // 2 :]}"
    message = _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], message)
    return f"{name}: {message}" if message else name


def line_of(error: BaseException) -> str:
    """An error of the user's code in one line, with its place.

    Args:
        error: It, or what a library has raised because of it.
    """
    cause = users_error(error) or error
    text, place = " ".join(text_of(cause).split()).rstrip(". "), place_in(cause)
    return f"{text}, at {place}" if place else text


def users_error(error: BaseException) -> BaseException | None:
    """The error of the user's code that an exception is, or was raised because of; None: none."""
    seen = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if place_in(cause):
            return cause
        seen.append(cause)
        cause = cause.__cause__
    return None
