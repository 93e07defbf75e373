"""Functions on intervals of integers: which ranges are open at a time, which contain others, and how much they cover.

Ranges may cross each other. The set of open ranges is constant between two boundaries, so n ranges make at most 2·n
segments. Values of several groups, such as the times of several threads, are mapped to positions on one axis, which is
exact for any 64-bit value. One sort, one search or one running maximum then serves all groups at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Axis, Bools, Integers, Ints, distinct

#: The index that stands for "no range", "no thread" or "no launch".
NONE = -1
#: A time before every time in a trace, ns.
LONG_AGO = -(2**62)


class Timeline:
    """Finds the range of a group that is open at a time: ``start <= time < end``.

    Args:
        group: shape (ranges,), the thread or process of each range.
        start, end: shape (ranges,), ns.
        innermost: if several ranges are open, True selects the range that opened last, and False the range that opened
            first. If two ranges open at the same time, the longer range counts as opened first.
    """

    def __init__(self, group: Ints, start: Ints, end: Ints, *, innermost: bool) -> None:
        ranges = np.flatnonzero(end > start)
        group, start, end = group[ranges], start[ranges], end[ranges]
        self._axis = Axis(group, start, end)
        order_by_start = np.lexsort((-end, start))
        # An interval covers the intervals before it in this order.
        order = order_by_start if innermost else order_by_start[::-1]
        low, high = self._axis.place(group[order], start[order]), self._axis.place(group[order], end[order])
        self._boundaries = distinct(np.concatenate([low, high]))
        topmost_interval = _find_topmost_intervals(
            np.searchsorted(self._boundaries, low), np.searchsorted(self._boundaries, high)
        )
        self._open = np.append(ranges[order], NONE)[topmost_interval]

    def open_at(self, group: Ints, time: Ints) -> Ints:
        """Returns the index of the range that is open at each (group, time), or -1; shape as ``time``."""
        segment = np.searchsorted(self._boundaries, self._axis.place(group, time), side="right") - 1
        return self._open[segment]  # segment -1, before the first boundary, selects the last entry, which is -1


def _find_topmost_intervals(low: Ints, high: Ints) -> Ints:
    """Returns the index of the last interval [low, high) that covers each position, or -1.

    The result has the shape (high.max() + 1,). Each interval is the union of two blocks whose length is the largest
    power of two that fits into the interval. Blocks are handled from the longest to the shortest, and each block passes
    the index of its interval on to its two halves. This takes n log n steps and no loop over the intervals.
    """
    length = int(high.max(initial=0)) + 1
    topmost_interval = np.full(length, NONE, np.int64)
    index = np.arange(len(low))
    level = np.log2(np.maximum(high - low, 1)).astype(np.int64)
    for power in range(int(level.max(initial=0)), -1, -1):
        at_level = level == power
        np.maximum.at(topmost_interval, low[at_level], index[at_level])
        np.maximum.at(topmost_interval, high[at_level] - (1 << power), index[at_level])
        if power:
            half = 1 << (power - 1)
            topmost_interval[half:] = np.maximum(topmost_interval[half:], topmost_interval[:-half].copy())
    return topmost_interval


def is_in_any_range(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Bools:
    """Returns True for each (``at_group``, ``at_time``) at which any of the ranges is open."""
    is_open: Bools = count_open_ranges(group, start, end, at_group, at_time) > 0
    return is_open


def count_open_ranges(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Ints:
    """Counts the ranges that are open at each (``at_group``, ``at_time``): started ranges minus ended ranges."""
    axis = Axis(group, start, end)
    starts, ends = np.sort(axis.place(group, start)), np.sort(axis.place(group, end))
    position = axis.place(at_group, at_time)
    return np.searchsorted(starts, position, side="right") - np.searchsorted(ends, position, side="right")


def is_inside_another_range(group: Ints, start: Ints, end: Ints) -> Bools:
    """Returns True for each range that lies inside another range of its group.

    If two ranges of a group are equal, the second range counts as inside the first.
    """
    order = np.lexsort((-end, start, group))
    end_position = Axis(group, end).place(group[order], end[order])
    # On the axis, the ends of an earlier group lie before all ends of a later group. So a range of another group never
    # counts as containing a range.
    furthest_end = np.maximum.accumulate(np.append(NONE, end_position))[:-1]
    inside = np.empty(len(order), np.bool_)
    inside[order] = furthest_end >= end_position
    return inside


def merge_ranges(group: Integers, start: Ints, end: Ints) -> tuple[Integers, Ints, Ints]:
    """Joins the ranges of each group that touch or overlap, and returns (group, start, end)."""
    if not len(start):
        return group, start, end
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    axis = Axis(group, start, end)
    furthest_end = np.maximum.accumulate(axis.place(group, end))
    first = np.flatnonzero(np.append(True, axis.place(group, start)[1:] > furthest_end[:-1]))
    return group[first], start[first], np.maximum.reduceat(end, first)


def contains_any_time(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Bools:
    """Returns True for each interval of ``at_group`` that contains a time of this group: ``start <= time < end``."""
    contains_time: Bools = count_times_inside(group, time, at_group, start, end) > 0
    return contains_time


def count_times_inside(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Ints:
    """Counts the times of the group ``at_group`` that lie in each interval [start, end)."""
    axis = Axis(group, time)
    positions = np.sort(axis.place(group, time))
    first, stop = (np.searchsorted(positions, axis.place(at_group, bound)) for bound in (start, end))
    return stop - first


def find_last_time_before(group: Ints, time: Ints, at_group: Ints, end: Ints) -> Ints:
    """Returns the last time of the group ``at_group`` before each ``end``, or ``LONG_AGO``; shape as ``end``."""
    axis = Axis(group, time)
    order = np.lexsort((time, group))
    last_before = np.searchsorted(axis.place(group, time)[order], axis.place(at_group, end))
    times, groups = np.append(LONG_AGO, time[order]), np.append(0, group[order])
    return np.where(groups[last_before] == at_group, times[last_before], LONG_AGO)


def measure_unions(group: Integers, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """Measures the time that the intervals of each group (0 to ``groups - 1``) cover; overlaps count once.

    Returns:
        Three arrays of shape (groups,), ns: covered time, first start and last end. A group without intervals has 0.
    """
    covered, first, last = np.zeros((3, groups), np.int64)
    merged_group, merged_start, merged_end = merge_ranges(group, start, end)
    first_of_group = np.flatnonzero(np.diff(merged_group, prepend=NONE))
    if len(first_of_group):
        covered[merged_group[first_of_group]] = np.add.reduceat(merged_end - merged_start, first_of_group)
        first[merged_group[first_of_group]] = merged_start[first_of_group]
        last[merged_group] = merged_end  # the last of several assignments remains, which is the group's last end
    return covered, first, last


@dataclass(frozen=True)
class Cover:
    """Sorted intervals that do not overlap, with functions that measure which parts of other intervals they cover.

    Attributes:
        start, end: shape (intervals,), ns.
        covered: shape (intervals + 1,), ns, the time covered before the start of each interval; the last entry is the
            time covered by all intervals.
    """

    start: Ints
    end: Ints
    covered: Ints

    @staticmethod
    def from_intervals(start: Ints, end: Ints) -> Cover:
        """Returns the union of the given intervals, which must be sorted by start."""
        if not len(start):
            return Cover(start, end, np.zeros(1, np.int64))
        furthest_end = np.maximum.accumulate(end)
        first = np.flatnonzero(np.append(True, start[1:] > furthest_end[:-1]))
        starts, ends = start[first], furthest_end[np.append(first[1:] - 1, len(end) - 1)]
        return Cover(starts, ends, np.append(0, np.cumsum(ends - starts)))

    def covered_before(self, time: Ints) -> Ints:
        """Returns the total time that the intervals cover before each ``time``, ns."""
        if not len(self.start):
            return np.zeros(len(time), np.int64)
        started_count = np.searchsorted(self.start, time, side="right")
        last_started = np.maximum(started_count - 1, 0)
        covered_by_last = np.where(
            started_count > 0, np.minimum(time, self.end[last_started]) - self.start[last_started], 0
        )
        return self.covered[last_started] + covered_by_last

    def covered_within(self, start: Ints, end: Ints) -> Ints:
        """Returns how much of each interval [start, end) these intervals cover, ns."""
        return self.covered_before(end) - self.covered_before(start)

    def find_gaps(self, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """Finds the parts of the intervals [start, end) that are not covered.

        Returns:
            For each uncovered part: the index of the interval in ``start``, and the part's start and end, ns.
        """
        first_interval = np.searchsorted(
            self.end, start, side="right"
        )  # the first covering interval that ends after `start`
        stop = np.searchsorted(self.start, end, side="left")  # the first covering interval that starts after `end`
        count = np.maximum(stop - first_interval, 0) + 1  # n covering intervals leave at most n + 1 gaps
        interval_index = np.repeat(np.arange(len(start)), count)
        gap = np.arange(len(interval_index)) - np.repeat(np.cumsum(count) - count, count)
        next_cover = first_interval[interval_index] + gap
        ends, starts = np.append(self.end, 0), np.append(self.start, 0)
        low = np.where(gap == 0, start[interval_index], ends[np.maximum(next_cover - 1, 0)])
        is_last = gap == count[interval_index] - 1
        high = np.where(is_last, end[interval_index], starts[np.minimum(next_cover, len(self.start))])
        low, high = np.maximum(low, start[interval_index]), np.minimum(high, end[interval_index])
        is_gap = high > low
        return interval_index[is_gap], low[is_gap], high[is_gap]


def find_overlaps(start: Ints, end: Ints, at_start: Ints, at_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Finds where the intervals [start, end) overlap the intervals [at_start, at_end).

    The intervals [start, end) must be sorted, and must not overlap each other.

    Returns:
        For each overlap: the index in ``at_start``, the index in ``start``, and the start and end of the overlap, ns.
    """
    first = np.searchsorted(end, at_start, side="right")
    count = np.maximum(np.searchsorted(start, at_end, side="left") - first, 0)
    at_index = np.repeat(np.arange(len(at_start)), count)
    interval = first[at_index] + np.arange(len(at_index)) - np.repeat(np.cumsum(count) - count, count)
    low, high = np.maximum(start[interval], at_start[at_index]), np.minimum(end[interval], at_end[at_index])
    is_common = high > low
    return at_index[is_common], interval[is_common], low[is_common], high[is_common]
