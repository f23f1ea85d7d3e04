"""What a rank tells of the mini-batches that it has run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpipe.schedule.actions import Op, Program
from lightning_gpipe.schedule.measured import Measured, durations


class RanBatch(NamedTuple):
    """A mini-batch that has run.

    Args:
        sections: Those of the rank's programs that ran in it, by number.
        begin: When the one before ended, by the rank's clock; None: it is the first of a fit, and
            counts from its first action, without the cut.
        end: When it ended itself.
        samples: The mini-batch's.
    """

    sections: range
    begin: float | None
    end: float
    samples: int


class Section(NamedTuple):
    """What a rank did in a section of a mini-batch, in seconds of one clock."""

    start: float
    end: float
    busy_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank did with a mini-batch.

    Args:
        sections: By their place in the mini-batch.
        seconds: From the end of the one before until its own.
        samples: The mini-batch's.
    """

    sections: Mapping[int, Section]
    seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank tells of the mini-batches since it has told last.

    Args:
        batches: The mini-batches, in order.
        times: What each kind of action took, in seconds, in the last of them.
        programs: What it ran in each section of the last one.
        peak_bytes: The most memory that it has held: the device's, or the whole process's on a CPU.
    """

    batches: tuple[Batch, ...] = ()
    times: Mapping[tuple[int, Op], float] | None = None
    programs: Mapping[int, Program] | None = None
    peak_bytes: int = 0


def by_batch(measured: Iterable[Measured], ran: Sequence[RanBatch]) -> list[list[Measured]]:
    """Which of the actions ran in which mini-batch."""
    place = {section: b for b, one in enumerate(ran) for section in one.sections}
    found: list[list[Measured]] = [[] for _ in ran]
    for one in measured:
        if one.section in place:
            found[place[one.section]].append(one)
    return found


def batch_of(measured: Sequence[Measured], ran: RanBatch, offset_s: float) -> Batch:
    """What a rank did with a mini-batch.

    Args:
        measured: Its actions.
        ran: The mini-batch.
        offset_s: What is added to the rank's clock.
    """
    rows: dict[int, list[Measured]] = defaultdict(list)
    for one in measured:
        rows[one.section - ran.sections.start].append(one)
    sections = {
        i: Section(
            min(one.start for one in row) + offset_s,
            max(one.done for one in row) + offset_s,
            sum(one.busy_s for one in row),
            sum(one.wait_s for one in row),
        )
        for i, row in rows.items()
    }
    begin = ran.begin
    if begin is None:
        begin = min((one.start for one in measured), default=ran.end)
    return Batch(sections, ran.end - begin, ran.samples)


def with_batches(
    before: RankReport, rows: Sequence[Sequence[Measured]], ran: Sequence[RanBatch], offset_s: float
) -> RankReport:
    """What a rank tells, with some mini-batches more.

    Args:
        before: What it was going to tell.
        rows: The actions of every mini-batch.
        ran: The mini-batches, at least one.
        offset_s: What is added to the rank's clock.
    """
    batches = [batch_of(row, one, offset_s) for row, one in zip(rows, ran, strict=True)]
    programs: dict[int, Program] = {}
    for one in rows[-1]:
        if not one.is_outside:
            place = one.section - ran[-1].sections.start
            programs[place] = (*programs.get(place, ()), one.action)
    times = durations(one for row in rows for one in row)
    return RankReport((*before.batches, *batches), times, programs)
