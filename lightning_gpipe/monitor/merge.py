"""Chrome traces of single ranks, as PyTorch's profiler writes them, as one."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from typing import Any

#: Of events that are connected by a number, which another rank may use, too.
_NUMBERED = ("s", "t", "f", "b", "n", "e", "N", "O", "D")


def merge_traces(files: Sequence[str], out: str, overwrite: bool = False) -> None:
    """Write one trace of those of several ranks, each with rows of its own.

    Times of the profiler go by the clock of the machine, so ranks of one machine stand right to
    each other; those of others as well as their clocks do.

    Args:
        files: Traces, ``.json`` or ``.json.gz``. The rank of one is what it says, else its place.
        out: Where to; packed if it ends in ``.gz``.
        overwrite: Whether to replace a file that is there.

    Raises:
        OSError: If a file can't be read, or one is there already.
        ValueError: If a file is no trace, or two are of one rank.
    """
    if os.path.exists(out) and not overwrite:
        raise FileExistsError(f"{out} is there already: give another name, or --overwrite.")
    traces = [_read(file) for file in files]
    ranks = [_rank(trace, place) for place, trace in enumerate(traces)]
    if len({*ranks}) < len(ranks):
        raise ValueError(f"Two of the traces are of the same rank: they say they are of {ranks}.")
    base = min(_base_us(trace) for trace in traces)
    events: list[Any] = []
    for rank, trace in sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0]):
        events += _of_rank(rank, trace, _base_us(trace) - base, first=len(events))
    with gzip.open(out, "wt") if out.endswith(".gz") else open(out, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _read(name: str) -> dict[str, Any]:
    with gzip.open(name, "rt") if name.endswith(".gz") else open(name) as file:
        try:
            trace = json.load(file)
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{name} is no Chrome trace, or damaged: {error}") from None
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{name} is no Chrome trace: it has no traceEvents.")
    if not all(isinstance(event, dict) for event in trace["traceEvents"]):
        raise ValueError(f"{name} is no Chrome trace: its traceEvents aren't all objects.")
    try:
        _of_rank(_rank(trace, 0), trace, _base_us(trace), first=0)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is no Chrome trace: {error}.") from None
    return trace


def _rank(trace: dict[str, Any], place: int) -> int:
    return int(trace.get("distributedInfo", {}).get("rank", place))


def _base_us(trace: dict[str, Any]) -> float:
    """The moment from which its times count, in microseconds."""
    return float(trace.get("baseTimeNanoseconds", 0)) / 1e3


def _of_rank(rank: int, trace: dict[str, Any], shift_us: float, first: int) -> list[Any]:
    """A rank's events, with processes and numbers that no other rank has.

    Args:
        rank: The rank.
        trace: Its trace.
        shift_us: What is added to its times.
        first: A number that is greater than those of the processes of other ranks.
    """
    processes: dict[Any, int] = {}
    found = []
    for event in trace["traceEvents"]:
        event = dict(event)
        own = event.get("pid")
        event["pid"] = processes.setdefault(own, first + len(processes))
        if "ts" in event:
            event["ts"] += shift_us
        if "id" in event and event.get("ph") in _NUMBERED:
            event["id"] = f"{rank}:{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', own)}"}
        elif event.get("name") == "process_sort_index":
            continue
        found.append(event)
    for pid in processes.values():
        order = {"sort_index": pid}
        found.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": order})
    return found
