"""A timeline as a Chrome trace, which Perfetto and chrome://tracing open.

The format is the JSON of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format): slices ``X`` with microseconds, flows ``s``, ``t``, ``f`` between them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from lightning_gpipe.schedule.measured import Measured

#: Names of colours in chrome://tracing; Perfetto gives each letter one of its own.
COLOURS = {
    "F": "good",
    "R": "yellow",
    "I": "rail_animation",
    "W": "rail_load",
    "B": "rail_response",
}
_WAIT_COLOUR, _OUTSIDE_COLOUR = "grey", "generic_work"
#: Seconds: what is shorter isn't seen.
_VISIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a rank did in a step.

    Args:
        rank: Its number among all.
        replica: Its pipeline.
        stage: Its stage.
        batches: The actions of every mini-batch, in order, with times of one clock.
    """

    rank: int
    replica: int
    stage: int
    batches: Sequence[Sequence[Measured]]

    @property
    def name(self) -> str:
        """The rank, for a row."""
        return f"rank {self.rank}, stage {self.stage}"


def begin_of(timelines: Sequence[Timeline]) -> float:
    """When the first action of all began."""
    return min(
        (one.start for line in timelines for batch in line.batches for one in batch), default=0.0
    )


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The timelines of all ranks as a trace: a process a pipeline, a row a rank.

    An action's slice has its name, such as ``1F0``, without what it waited for, which is a slice of
    its own. Arrows follow each micro-batch through the stages, forward and back.
    """
    begin = begin_of(timelines)
    events = [*_rows(timelines)]
    for line in timelines:
        for batch in line.batches:
            for one in batch:
                events += _slices(line, one, begin)
    return {"traceEvents": [*events, *_flows(timelines, begin)], "displayTimeUnit": "ms"}


def write(timelines: Sequence[Timeline], path: str) -> None:
    """Write the trace of all ranks to a file."""
    with fsspec.open(path, "w") as file:
        json.dump(chrome_trace(timelines), file)


def _rows(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    for line in timelines:
        place = {"ph": "M", "pid": line.replica, "tid": line.stage}
        if line.stage == 0:
            yield {**place, "name": "process_name", "args": {"name": f"pipeline {line.replica}"}}
        yield {**place, "name": "thread_name", "args": {"name": line.name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": line.stage}}


def _slices(line: Timeline, one: Measured, begin: float) -> Iterator[dict[str, Any]]:
    """An action, and what it waited for before and after it."""
    stage, op, m = one.action
    about = {"stage": stage, "micro_batch": m, "wait_ms": round(1e3 * one.wait_s, 3)}
    if one.is_outside:
        yield _slice(line, f"step {m}", one.begin, one.end, begin, _OUTSIDE_COLOUR, about)
        return
    if one.begin - one.start > _VISIBLE:
        yield _slice(line, "wait", one.start, one.begin, begin, _WAIT_COLOUR, about)
    yield _slice(line, repr(one.action), one.begin, one.end, begin, COLOURS[op], about)
    if one.done - one.end > _VISIBLE:
        yield _slice(line, "send", one.end, one.done, begin, _WAIT_COLOUR, about)


def _slice(
    line: Timeline,
    name: str,
    start: float,
    end: float,
    begin: float,
    colour: str,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    first, last = _microseconds(start - begin), _microseconds(end - begin)
    return {
        "ph": "X",
        "name": name,
        "cat": "gpipe",
        "pid": line.replica,
        "tid": line.stage,
        "ts": first,
        "dur": round(last - first, 3),
        "cname": colour,
        "args": dict(about),
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _flows(timelines: Sequence[Timeline], begin: float) -> Iterator[dict[str, Any]]:
    """The way of each micro-batch: forwards, then the backwards for which a stage waits.

    It goes by when they begin, since a backward hands its gradient on before it ends.
    """
    ways: dict[tuple[int, int, int], list[tuple[float, int]]] = defaultdict(list)
    for line in timelines:
        for b, batch in enumerate(line.batches):
            for one in batch:
                if one.action.op in "FBI" and not one.is_outside:
                    inside = one.begin + min((one.end - one.begin) / 2, _VISIBLE) - begin
                    way = ways[line.replica, b, one.action.micro_batch]
                    way.append((inside, line.stage))
    for number, ((replica, _, m), way) in enumerate(ways.items()):
        if len(way) == 1:
            continue
        for i, (inside, stage) in enumerate(sorted(way)):
            phase = "s" if i == 0 else "f" if i == len(way) - 1 else "t"
            yield {
                "ph": phase,
                "bp": "e",
                "id": number,
                "name": f"micro-batch {m}",
                "cat": "gpipe",
                "pid": replica,
                "tid": stage,
                "ts": _microseconds(inside),
            }
