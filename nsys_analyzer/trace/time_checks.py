"""Finds rows with impossible times when a trace is read. The report lists these rows, and no figure includes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsys_analyzer.text import StrOrText, phrase
from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.columns import Launches, MemoryUses, Operations, Ranges, process_of, quote_name
from nsys_analyzer.trace.schema import MEMORY, NO_TIME, OPERATIONS_BY_KIND, RUNTIME, Table

#: A time is invalid if it is more than this (a year) before or after the start of the session.
MAX_DISTANCE_NS = 365 * 24 * 3600 * 10**9
#: A valid row may lie outside the recorded session by at most this time. Some NVTX ranges and API calls lie outside by
#: milliseconds.
_SESSION_SLACK_NS = 10**9
#: The recorded duration of the session is used if at least this share of the rows lies in the session. Otherwise the
#: duration itself may be wrong.
_MIN_SHARE_IN_SESSION = 0.5
#: Without a usable duration, the session is assumed to extend from the earliest to the latest likely time. A valid row
#: may lie outside this session by at most this many times its length, plus this margin.
_MAX_EXTENTS_OUTSIDE, _MARGIN_NS = 2, 60 * 10**9
#: The likely times are the sorted times without one in this many (and at least one) at either end, which may be
#: damaged.
_ROWS_PER_DAMAGED_ROW = 1_000


@dataclass(frozen=True)
class ExcludedRows:
    """Rows of one table and one process that are excluded from every figure, for one reason.

    Attributes:
        process: global process ID.
        table: name of the table in the export.
        rows: number of rows.
        reason: what is wrong with the times of the rows.
        example: a description of the first of these rows.
        only_end_excluded: whether only the ends of the rows are excluded. The rows are then API calls, and are kept
            without a duration.
        is_shortened: whether the rows are kept with an earlier end.
    """

    process: int
    table: str
    rows: int
    reason: str
    example: StrOrText
    only_end_excluded: bool = False
    is_shortened: bool = False


@dataclass(frozen=True)
class TimedRows:
    """The rows of a table whose times are checked.

    Attributes:
        start, end: shape (rows,), ns; ``NO_TIME`` if the file has no time.
        process: shape (rows,), global process IDs.
        describe: returns a description of the row at an index.
    """

    table: Table
    start: Ints
    end: Ints
    process: Ints
    describe: Callable[[int], StrOrText]


class TimeCheck:
    """Finds the rows of one trace that have valid times, and records the other rows in ``left_out``.

    Args:
        duration: duration of the session, ns; None if unknown.
        row_starts: arrays with the starts of operations, API calls and ranges, ns.
        start: start of the session, ns.
        by_cupti: whether nsys recorded the trace. Other profilers may begin with an event at 0 and round durations
            to microseconds.
    """

    def __init__(self, duration: int | None, *row_starts: Ints, start: int, by_cupti: bool) -> None:
        self._by_cupti = by_cupti
        self._first_range, self._first, self._last = _find_bounds(duration, row_starts, start)
        self.left_out: list[ExcludedRows] = []

    def find_valid_operations(self, operations: Operations) -> Bools:
        """Returns the mask of the operations with valid times, shape (operations,)."""
        are_valid = np.ones(len(operations), np.bool_)
        for kind, table in enumerate(OPERATIONS_BY_KIND):
            operations_of_kind = operations.of_kind(kind)
            rows = _make_timed_rows(table, operations.select(operations_of_kind))
            are_valid[operations_of_kind] = self._find_valid(rows, is_cuda=True, needs_duration=self._by_cupti)
        return are_valid

    def find_unique_operations(self, operations: Operations) -> Bools:
        """Returns the mask of the operations that are not copies of an earlier row, shape (operations,)."""
        are_first = np.ones(len(operations), np.bool_)
        for kind, table in enumerate(OPERATIONS_BY_KIND):
            operations_of_kind = operations.of_kind(kind)
            rows = operations.select(operations_of_kind)
            start, order = rows.start, None
            # Sorts only if needed, because nsys usually writes operations in order of start.
            if (start[1:] < start[:-1]).any():
                order = np.argsort(start, kind="stable")
                start = start[order]
            same_start = np.flatnonzero(start[1:] == start[:-1])
            # Most operations with equal starts run on different GPUs, and are no duplicates.
            candidates = np.union1d(same_start, same_start + 1)
            candidates = candidates if order is None else np.sort(order[candidates])
            row_values = np.stack([np.asarray(column, np.int64)[candidates] for column in rows.columns().values()])
            order_by_value = np.lexsort(row_values)  # the sort is stable, so the first of equal rows stays first
            are_duplicates = np.zeros(len(rows), np.bool_)
            is_equal = (row_values[:, order_by_value[1:]] == row_values[:, order_by_value[:-1]]).all(axis=0)
            are_duplicates[candidates[order_by_value[1:]]] = is_equal
            timed_rows = _make_timed_rows(table, rows)
            self.left_out += describe_excluded_rows(timed_rows, "all values of another row", are_duplicates)
            are_first[operations_of_kind] = ~are_duplicates
        return are_first

    def find_valid_calls(self, launches: Launches) -> Bools:
        """Returns the mask of the API calls with valid starts. Replaces each invalid end by the start, in place."""
        start, end = launches.start, launches.end
        are_valid = self._find_valid(timed_calls(launches, start), is_cuda=True)
        for reason, are_wrong in (
            ("no end", end == NO_TIME),
            ("an end before the start", (end < start) & (end != NO_TIME)),
            ("an end outside the capture", end > self._last),
        ):
            self.left_out += describe_excluded_rows(
                timed_calls(launches, end), reason, are_valid & are_wrong, only_end_excluded=True
            )
        end[:] = np.where((end >= start) & (end <= self._last), end, start)
        return are_valid

    def find_valid_ranges(self, table: Table, ranges: Ranges) -> Bools:
        """Returns whether the times of each range are valid. The end of a valid range may be missing."""
        after_start = np.maximum(ranges.start, ranges.start + 1)  # start + 1 overflows at the largest integer
        end = np.where(ranges.end == NO_TIME, after_start, ranges.end)
        process = process_of(ranges.thread)
        rows = TimedRows(table, ranges.start, end, process, lambda i: quote_name(ranges.names[ranges.name[i]]))
        return self._find_valid(rows, needs_duration=self._by_cupti)

    def find_valid_memory(self, memory_uses: MemoryUses) -> Bools:
        """Returns the mask of the allocations and releases with valid times."""
        rows = TimedRows(
            MEMORY,
            memory_uses.start,
            memory_uses.start,
            memory_uses.process,
            lambda i: f"{abs(memory_uses.bytes[i]):,} bytes",
        )
        return self._find_valid(rows)

    def _find_valid(self, rows: TimedRows, *, is_cuda: bool = False, needs_duration: bool = False) -> Bools:
        """Returns the mask of the valid rows, shape (rows,), and records each invalid row with one reason.

        Args:
            rows: the rows.
            is_cuda: whether the rows are operations or API calls. Unlike ranges, they cannot start before the session.
            needs_duration: whether a row whose end equals its start is invalid.
        """
        start, end, last = rows.start, rows.end, self._last
        are_valid = np.ones(len(start), np.bool_)
        first = self._first if is_cuda else self._first_range
        zero_is_unknown = is_cuda and self._by_cupti  # CUPTI writes 0 for times that it could not collect
        min_start = max(first, 1 if zero_is_unknown else NO_TIME + 1)
        if not len(start) or (
            start.min() >= min_start
            and end.max() <= last
            and not (end <= start if needs_duration else end < start).any()
        ):
            return are_valid  # returns early, because nearly all tables contain valid times only
        are_unknown = (start == NO_TIME) | (end == NO_TIME)
        if zero_is_unknown:
            are_unknown |= (start == 0) & (end == 0)
        are_reversed = ~are_unknown & (end < start)
        are_empty = ~are_unknown & (end == start) & needs_duration
        are_outside = ~are_unknown & ~are_reversed & ~are_empty & ((start < first) | (end > last))
        for reason, are_wrong in (
            ("no times", are_unknown),
            ("an end before the start", are_reversed),
            ("no duration", are_empty),
            ("a time outside the capture", are_outside),
        ):
            if are_wrong.any():
                are_valid &= ~are_wrong
                self.left_out += describe_excluded_rows(rows, reason, are_wrong)
        return are_valid


def _make_timed_rows(table: Table, operations: Operations) -> TimedRows:
    """Returns operations in the form in which their times are checked."""
    return TimedRows(table, operations.start, operations.end, operations.process, operations.describe)


def _find_bounds(duration: int | None, row_starts: Sequence[Ints], start: int) -> tuple[int, int, int]:
    """Returns the earliest valid start of a range, the earliest other valid start, and the latest valid end (ns).

    A range may begin before the session.
    """
    if duration is not None:
        first = max(start - MAX_DISTANCE_NS, NO_TIME)
        inside_count = sum(np.count_nonzero((times > first) & (times <= start + duration)) for times in row_starts)
        if inside_count >= _MIN_SHARE_IN_SESSION * sum(np.count_nonzero(times != NO_TIME) for times in row_starts):
            return start - MAX_DISTANCE_NS, start - _SESSION_SLACK_NS, start + duration + _SESSION_SLACK_NS
    times = np.concatenate([times[times != NO_TIME] for times in row_starts])
    if not len(times):
        return start - MAX_DISTANCE_NS, start - MAX_DISTANCE_NS, start + MAX_DISTANCE_NS
    # The recorded session is wrong, not the rows. For example, the times may count from 1970.
    # Not np.median, which may be the mean of two times.
    median_time = int(np.partition(times, len(times) // 2)[len(times) // 2])
    likely = times[(times > median_time - MAX_DISTANCE_NS) & (times < median_time + MAX_DISTANCE_NS)]
    edge_rows = min(1 + len(likely) // _ROWS_PER_DAMAGED_ROW, (len(likely) - 1) // 2)
    first, last = np.partition(likely, (edge_rows, len(likely) - 1 - edge_rows))[[edge_rows, -1 - edge_rows]].tolist()
    max_outside = _MAX_EXTENTS_OUTSIDE * (last - first) + _MARGIN_NS
    return median_time - MAX_DISTANCE_NS, first - max_outside, last + max_outside


def timed_calls(launches: Launches, end: Ints) -> TimedRows:
    """Returns API calls with the given ends (ns) as rows whose times are checked."""
    process = process_of(launches.thread)
    return TimedRows(RUNTIME, launches.start, end, process, lambda i: f"correlation ID {launches.correlation[i]}")


def describe_excluded_rows(
    rows: TimedRows, reason: str, are_wrong: Bools, *, only_end_excluded: bool = False
) -> Iterator[ExcludedRows]:
    """Yields, for each process, a description of its rows that ``are_wrong`` marks, shape (rows,)."""
    index = np.flatnonzero(are_wrong)
    for process in distinct(rows.process[index]).tolist():
        indices = index[rows.process[index] == process]
        first_index = int(indices[0])
        start, end = _format_time(rows.start[first_index]), _format_time(rows.end[first_index])
        example = phrase("{}, {} to {} ns", rows.describe(first_index), start, end)
        yield ExcludedRows(process, rows.table.aliases[0], len(indices), reason, example, only_end_excluded)


def _format_time(time: Any) -> str:
    """Returns a time in ns as text; "unknown" if the file has no time."""
    return "unknown" if time == NO_TIME else f"{int(time):,}"
