"""Rows whose times cannot be true: found as a trace is read, left out of every figure, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsys_analyzer.text import Words, phrase
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.schema import NO_TIME, Table

#: Nothing that one trace holds lies a year from the start of its session, where times count from.
FAR = 365 * 24 * 3600 * 10**9
#: By how much rows lie outside the session that an export tells: NVTX ranges and API calls do by milliseconds.
_SLACK = 10**9
#: The share of the rows that lie in a session whose duration can be believed: one table of several may be broken.
_LEAST_INSIDE = 0.5
#: Without a word of the session a row may lie outside all others by as many times their extent, and so long besides.
_MOST_EXTENTS, _MARGIN = 2, 60 * 10**9
#: The first and the last rows may be broken: one, and one in so many.
_ROWS_PER_BROKEN = 1_000


@dataclass(frozen=True)
class LeftOut:
    """How many rows of one table and one process were left out of every figure and why, with the first of them."""

    process: int
    table: str
    rows: int
    why: str
    example: Words


@dataclass(frozen=True)
class TimedRows:
    """The rows of a table: times in ns, ``NO_TIME`` where the file holds none, and global process IDs.

    ``describe`` says in words which row an index stands for.
    """

    table: Table
    start: Ints
    end: Ints
    process: Ints
    describe: Callable[[int], Words]


class TimeCheck:
    """Finds the rows of one trace whose times can be true, and keeps account of the others.

    Other traces than CUPTI's own, of nsys, may begin with an event at 0, and round durations to microseconds.

    Args:
        duration: of the session, ns; None if unknown.
        moments: the starts of operations, API calls and ranges, ns.
        start: of the session, ns.
    """

    def __init__(self, duration: int | None, *moments: Ints, start: int, by_cupti: bool) -> None:
        self._by_cupti = by_cupti
        self._opened, self._first, self._last = _bounds(duration, moments, start)
        self.left_out: list[LeftOut] = []

    def valid(self, rows: TimedRows, *, of_cuda: bool = False, lasting: bool = False) -> Bools:
        """Shape (rows,): True for the rows to keep.

        Args:
            of_cuda: whether they are operations or API calls, which nothing records before the session.
            lasting: whether they are operations or ranges, of which none ends as it starts.
        """
        kept = np.ones(len(rows.start), np.bool_)
        for why, wrong in self._faults(rows, of_cuda=of_cuda, lasting=lasting and self._by_cupti):
            kept &= ~wrong
            self.left_out += left_out_rows(rows, why, wrong)
        return kept

    def _faults(self, rows: TimedRows, *, of_cuda: bool, lasting: bool) -> Iterator[tuple[str, Bools]]:
        """The faults of rows, in words, and the mask of the rows that have each: a row has one at most."""
        start, end, last = rows.start, rows.end, self._last
        first = self._first if of_cuda else self._opened
        zero_is_unknown = of_cuda and self._by_cupti  # CUPTI writes 0 for times that it could not collect
        least = max(first, 1 if zero_is_unknown else NO_TIME + 1)
        if not len(start) or (
            start.min() >= least and end.max() <= last and not (end <= start if lasting else end < start).any()
        ):
            return  # as of nearly all tables
        unknown = (start == NO_TIME) | (end == NO_TIME)
        if zero_is_unknown:
            unknown |= (start == 0) & (end == 0)
        backwards = ~unknown & (end < start)
        timeless = ~unknown & (end == start) & lasting
        outside = ~unknown & ~backwards & ~timeless & ((start < first) | (end > last))
        for why, wrong in (
            ("no times", unknown),
            ("an end before the start", backwards),
            ("no duration", timeless),
            ("a time outside the capture", outside),
        ):
            if wrong.any():
                yield why, wrong


def _bounds(duration: int | None, moments: Sequence[Ints], start: int) -> tuple[int, int, int]:
    """The earliest start of a range, which may be open long before the session; of anything else; the latest end."""
    if duration is not None:
        first = max(start - FAR, NO_TIME)
        inside = sum(np.count_nonzero((some > first) & (some <= start + duration)) for some in moments)
        if inside >= _LEAST_INSIDE * sum(np.count_nonzero(some != NO_TIME) for some in moments):
            return start - FAR, start - _SLACK, start + duration + _SLACK
    known = np.concatenate([some[some != NO_TIME] for some in moments])
    if not len(known):
        return start - FAR, start - FAR, start + FAR
    # Not the rows are wrong, but what is known of the session: times may count from 1970.
    middle = int(np.partition(known, len(known) // 2)[len(known) // 2])  # one of them, unlike the mean of two
    likely = known[(known > middle - FAR) & (known < middle + FAR)]
    edge = min(1 + len(likely) // _ROWS_PER_BROKEN, (len(likely) - 1) // 2)
    first, last = np.partition(likely, (edge, len(likely) - 1 - edge))[[edge, -1 - edge]].tolist()
    reach = _MOST_EXTENTS * (last - first) + _MARGIN
    return middle - FAR, first - reach, last + reach


def left_out_rows(rows: TimedRows, why: str, wrong: Bools) -> Iterator[LeftOut]:
    """The rows with one fault (``wrong``, shape (rows,)), for each process."""
    index = np.flatnonzero(wrong)
    for process in distinct(rows.process[index]).tolist():
        indices = index[rows.process[index] == process]
        first = int(indices[0])
        example = phrase("{}, {} to {} ns", rows.describe(first), _time(rows.start[first]), _time(rows.end[first]))
        yield LeftOut(process, rows.table.aliases[0], len(indices), why, example)


def _time(time: Any) -> str:
    return "unknown" if time == NO_TIME else f"{int(time):,}"
