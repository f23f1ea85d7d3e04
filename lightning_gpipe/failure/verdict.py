"""Why a run ends, and which of several errors came first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.distributed import DistBackendError

from lightning_gpipe.comm.messages import RemoteError

NO_RANK = -1


_TEXT = 4000  # characters of an error


_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|by peer", re.IGNORECASE)


ORPHAN = "the process that started it is gone"


DIED = "its process died, as when it is killed or the machine is out of memory"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends.

    Args:
        rank: The process where it began; -1: all of them.
        stage: Its pipeline stage.
        text: The error.
        is_consequence: Whether it looks like the consequence of another process's error.
    """

    rank: int
    stage: int
    text: str
    is_consequence: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int, stages: int) -> Failure:
        """The failure that an exception on this rank is."""
        lost = isinstance(error, (RemoteError, DistBackendError)) or (
            isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        )
        name = type(error).__name__
        text = f"{name}: {error}" if str(error) else name
        return cls(rank, rank % stages, text[:_TEXT], lost)

    def plausibility(self) -> int:
        """How little likely this is the cause of what happened at the same time.

        A launcher sends SIGTERM to all other processes when it sees that one died.
        """
        if self.is_consequence:
            return 3
        return 2 if self.text.startswith("SIGTERM") else int(self.text == DIED)

    def __str__(self) -> str:
        if self.rank == NO_RANK:
            return self.text
        return f"Rank {self.rank} (stage {self.stage}) failed: {self.text}"
