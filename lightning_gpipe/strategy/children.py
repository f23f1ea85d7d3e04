"""The processes that this one has started, and what becomes of it when one of them ends."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_gpipe.failure.screen import say

#: In the environment of the processes that one starts: which it is, and how many a node has then.
STARTED_BY = "LIGHTNING_GPIPE_STARTED_BY"
_TICK_S = 0.2
#: The processes of this node that this one has started, by local rank less one.
children: list[PatientlySeen] = []


def _parent_of(said: str) -> int | None:
    """The process that has started this one as a rank, which may be gone; None: none has.

    Args:
        said: Which it is, by its own account; other processes inherit that.
    """
    if not said.isdecimal():
        return None
    if int(said) != os.getppid():
        try:
            os.kill(int(said), 0)
        except ProcessLookupError:
            return int(said)  # it is gone
        except OSError:
            pass
        return None
    return int(said)


_starter, _, _number = os.environ.pop(STARTED_BY, "").partition(" ")
#: The process of local rank 0, in those that it has started.
_parent = _parent_of(_starter)


class PatientlySeen:
    """A child process that seems to run until the others have had time to hear of its failure.

    Args:
        process: The child.
        patience_s: The time that they have.
    """

    def __init__(self, process: Any, patience_s: float) -> None:
        self.returncode: int | None = None
        self._process, self._patience_s = process, patience_s
        self._failed: float | None = None

    def poll(self) -> int | None:
        """Look whether the process has ended; see ``subprocess.Popen``."""
        code: int | None = self._process.poll()
        if code:
            self._failed = self._failed or time.monotonic()
            if time.monotonic() - self._failed < self._patience_s:
                return None
        self.returncode = code
        return code

    def poll_now(self) -> int | None:
        """The exit code, as soon as there is one."""
        code: int | None = self._process.poll()
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def refuse_another_number(processes: int) -> None:
    """Refuse to wait for processes that nobody will start, since an earlier Trainer has.

    Args:
        processes: Of this node, for the Trainer that is about to run.

    Raises:
        RuntimeError: If the earlier one had another number, on all ranks alike.
    """
    started = len(children) + 1 if children else int(_number) if _parent is not None else processes
    if started != processes:
        raise RuntimeError(
            f"An earlier Trainer of this script has started {started} processes, and this one has"
            f" {processes}. A script runs from its top in each of them, so all its Trainers share"
            " them: keep runs with different numbers of devices in scripts of their own, or give"
            " GPipeStrategy(start_method='spawn')."
        )


def are_started_elsewhere(environment: Any) -> bool:
    """Whether no Trainer starts the processes of a node, but a launcher.

    Args:
        environment: Lightning's cluster environment.
    """
    return environment.creates_processes_externally and not children and _parent is None


def wait_for_children(seconds: float) -> None:
    """Wait until the processes that this one has started have ended."""
    end = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))


@contextmanager
def expecting_all(first_rank: int, grace_s: float) -> Iterator[None]:
    """Wait for all ranks to come inside, where nobody else would notice that one is gone.

    Args:
        first_rank: The global rank of the node's first process.
        grace_s: For the main thread to hear of it; else the process ends.

    Raises:
        RuntimeError: Instead of a lost connection, if a process that this one has started, or that
            has started this one, has ended.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_TICK_S):
            gone = _who_is_gone(first_rank)
            if gone is not None and not over.wait(grace_s):
                say(gone)
                _end_children()
                os._exit(1)

    threading.Thread(target=watch, name="gpipe-expecting", daemon=True).start()
    try:
        yield
    except Exception:
        end = time.monotonic() + 1.0
        while (gone := _who_is_gone(first_rank)) is None and time.monotonic() < end:
            time.sleep(_TICK_S)  # its connections end before it does
        if gone is None:
            raise
        _end_children()
        raise RuntimeError(gone) from None
    finally:
        over.set()


def _who_is_gone(first_rank: int) -> str | None:
    found = [(rank, child.poll_now()) for rank, child in enumerate(children, first_rank + 1)]
    gone = [f"Rank {rank} ended (exit code {code})" for rank, code in found if code is not None]
    if _parent is not None and os.getppid() != _parent:
        gone = [f"Rank {first_rank} ended"]
    if not gone:
        return None
    return (
        f"{'; '.join(gone)} while the others wait for it to begin a run. Build the same Trainers on"
        " every rank, and call fit, validate, test and predict on them alike: no rank may leave"
        " the script before."
    )


def _end_children() -> None:
    for child in children:
        with suppress(OSError):
            child.terminate()
