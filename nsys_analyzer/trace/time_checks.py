"""Rows whose times cannot be true: found as a trace is read, left out of every figure, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import Launches, MemoryUses, Operations, Ranges, process_of, quote_name
from nsys_analyzer.trace.schema import MEMORY, NO_TIME, OPERATIONS_BY_KIND, RUNTIME, Table

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
class ExcludedRows:
    """How many rows of one table and one process were left out of every figure and why, with the first of them.

    ``starts_count``: only their ends were left out, so these API calls have no known duration. ``cut``: they were kept
    with an earlier end.
    """

    process: int
    table: str
    rows: int
    why: str
    example: StrOrText
    starts_count: bool = False
    cut: bool = False


@dataclass(frozen=True)
class TimedRows:
    """The rows of a table: times in ns, ``NO_TIME`` where the file holds none, and global process IDs.

    ``describe`` says in words which row an index stands for.
    """

    table: Table
    start: Ints
    end: Ints
    process: Ints
    describe: Callable[[int], StrOrText]


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
        self.left_out: list[ExcludedRows] = []

    def operations(self, operations: Operations) -> Bools:
        """Returns which operations have times that can be true."""
        kept = np.ones(len(operations), np.bool_)
        for kind, table in enumerate(OPERATIONS_BY_KIND):
            of_kind = operations.of_kind(kind)
            rows = _rows_of(table, operations.select(of_kind))
            kept[of_kind] = self._valid(rows, of_cuda=True, lasting=self._by_cupti)
        return kept

    def not_repeated(self, operations: Operations) -> Bools:
        """Returns which operations are no second row of the same one, with all its values."""
        once = np.ones(len(operations), np.bool_)
        for kind, table in enumerate(OPERATIONS_BY_KIND):
            of_kind = operations.of_kind(kind)
            some = operations.select(of_kind)
            start, order = some.start, None
            if (start[1:] < start[:-1]).any():  # nsys writes them in order
                order = np.argsort(start, kind="stable")
                start = start[order]
            same = np.flatnonzero(start[1:] == start[:-1])
            alike = np.union1d(same, same + 1)  # a pair on two GPUs, as a rule
            alike = alike if order is None else np.sort(order[alike])
            values = np.stack([np.asarray(column, np.int64)[alike] for column in some.columns().values()])
            sorted_ = np.lexsort(values)  # stable: of equal rows the first is kept
            repeated = np.zeros(len(some), np.bool_)
            repeated[alike[sorted_[1:]]] = (values[:, sorted_[1:]] == values[:, sorted_[:-1]]).all(axis=0)
            self.left_out += describe_excluded_rows(_rows_of(table, some), "all values of another row", repeated)
            once[of_kind] = ~repeated
        return once

    def calls(self, launches: Launches) -> Bools:
        """Returns which API calls have starts that can be true; an end that cannot be becomes the start, in place."""
        start, end = launches.start, launches.end
        kept = self._valid(timed_calls(launches, start), of_cuda=True)
        for why, wrong in (
            ("no end", end == NO_TIME),
            ("an end before the start", (end < start) & (end != NO_TIME)),
            ("an end outside the capture", end > self._last),
        ):
            self.left_out += describe_excluded_rows(timed_calls(launches, end), why, kept & wrong, starts_count=True)
        end[:] = np.where((end >= start) & (end <= self._last), end, start)
        return kept

    def ranges(self, table: Table, ranges: Ranges) -> Bools:
        """Returns which ranges have times that can be true; one without an end has none that is wrong."""
        later = np.maximum(ranges.start, ranges.start + 1)  # the last moment that there is wraps around
        end = np.where(ranges.end == NO_TIME, later, ranges.end)
        process = process_of(ranges.thread)
        rows = TimedRows(table, ranges.start, end, process, lambda i: quote_name(ranges.names[ranges.name[i]]))
        return self._valid(rows, lasting=self._by_cupti)

    def memory(self, uses: MemoryUses) -> Bools:
        """Returns which allocations and releases have times that can be true."""
        rows = TimedRows(MEMORY, uses.start, uses.start, uses.process, lambda i: f"{abs(uses.bytes[i]):,} bytes")
        return self._valid(rows)

    def _valid(self, rows: TimedRows, *, of_cuda: bool = False, lasting: bool = False) -> Bools:
        """Returns the mask of the rows to keep, shape (rows,), and notes the others with their fault, one at most.

        Args:
            rows: the rows.
            of_cuda: whether they are operations or API calls, which nothing records before the session.
            lasting: whether none ends as it starts.
        """
        start, end, last = rows.start, rows.end, self._last
        kept = np.ones(len(start), np.bool_)
        first = self._first if of_cuda else self._opened
        zero_is_unknown = of_cuda and self._by_cupti  # CUPTI writes 0 for times that it could not collect
        least = max(first, 1 if zero_is_unknown else NO_TIME + 1)
        if not len(start) or (
            start.min() >= least and end.max() <= last and not (end <= start if lasting else end < start).any()
        ):
            return kept  # as of nearly all tables
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
                kept &= ~wrong
                self.left_out += describe_excluded_rows(rows, why, wrong)
        return kept


def _rows_of(table: Table, operations: Operations) -> TimedRows:
    return TimedRows(table, operations.start, operations.end, operations.process, operations.called)


def _bounds(duration: int | None, moments: Sequence[Ints], start: int) -> tuple[int, int, int]:
    """Returns the earliest start of a range, which may be open before the session; of anything else; the last end."""
    if duration is not None:
        first = max(start - FAR, NO_TIME)
        inside = sum(np.count_nonzero((some > first) & (some <= start + duration)) for some in moments)
        if inside >= _LEAST_INSIDE * sum(np.count_nonzero(some != NO_TIME) for some in moments):
            return start - FAR, start - _SLACK, start + duration + _SLACK
    times = np.concatenate([some[some != NO_TIME] for some in moments])
    if not len(times):
        return start - FAR, start - FAR, start + FAR
    # Not the rows are wrong, but what is known of the session: times may count from 1970.
    middle = int(np.partition(times, len(times) // 2)[len(times) // 2])  # one of them, unlike the mean of two
    likely = times[(times > middle - FAR) & (times < middle + FAR)]
    edge = min(1 + len(likely) // _ROWS_PER_BROKEN, (len(likely) - 1) // 2)
    first, last = np.partition(likely, (edge, len(likely) - 1 - edge))[[edge, -1 - edge]].tolist()
    reach = _MOST_EXTENTS * (last - first) + _MARGIN
    return middle - FAR, first - reach, last + reach


def timed_calls(launches: Launches, end: Ints) -> TimedRows:
    """Returns API calls with these ends."""
    process = process_of(launches.thread)
    return TimedRows(RUNTIME, launches.start, end, process, lambda i: f"correlation ID {launches.correlation[i]}")


def describe_excluded_rows(
    rows: TimedRows, why: str, wrong: Bools, *, starts_count: bool = False
) -> Iterator[ExcludedRows]:
    """Returns the rows with one fault (``wrong``, shape (rows,)), for each process."""
    index = np.flatnonzero(wrong)
    for process in distinct(rows.process[index]).tolist():
        indices = index[rows.process[index] == process]
        first = int(indices[0])
        example = phrase("{}, {} to {} ns", rows.describe(first), _time(rows.start[first]), _time(rows.end[first]))
        yield ExcludedRows(process, rows.table.aliases[0], len(indices), why, example, starts_count)


def _time(time: Any) -> str:
    return "unknown" if time == NO_TIME else f"{int(time):,}"
