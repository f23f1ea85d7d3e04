"""How long each side of a failure is waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times in seconds.

    Args:
        event_s: An error and its consequences arrive within this time.
        grace_s: For a main thread to hear of an error.
        cleanup_s: For its callbacks and loggers to end then.
        abort_s: For process groups to be aborted.
        exit_s: For a process to end after its main thread has.
        stall_s: For which all ranks must wait, and none work, to be taken for stuck.
        hello_s: For a connection to say who it is.
        patience_s: For all processes to say why they end, before the launcher kills those left.
    """

    event_s: float = 0.5
    grace_s: float = 5.0
    cleanup_s: float = 60.0
    abort_s: float = 2.0
    exit_s: float = 8.0
    stall_s: float = 120.0
    hello_s: float = 5.0
    patience_s: float = 8.0
