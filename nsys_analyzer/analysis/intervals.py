"""Functions on intervals of integers: which ranges are open at a moment, which contain others, and how much they cover.

Ranges may cross each other. What is open is constant between two boundaries, so n ranges make at most 2·n segments.
Values of several groups, such as the times of several threads, are placed on one axis, which is exact for any 64-bit
value. One sort, one search or one running maximum then serves all groups at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, blocks, distinct

#: The index that stands for "no range", "no thread" or "no launch".
NONE = -1
#: A time before every moment of a trace, ns.
LONG_AGO = -(2**62)
#: The place of a value whose group is not on the axis: before all others.
OFF_AXIS = -1
#: The longest axis whose places fit into 64 bits with room to spare.
_MAX_AXIS_LENGTH = 1 << 62


class Timeline:
    """Finds the range that is open at each moment of each group: ``start <= time < end``.

    Args:
        group: shape (ranges,), the thread or process of each range.
        start, end: shape (ranges,), ns.
        latest: take the range that opened last, not the one that opened first; of two ranges that open together, the
            longer one counts as the first.
    """

    def __init__(self, group: Ints, start: Ints, end: Ints, *, latest: bool) -> None:
        ranges = np.flatnonzero(end > start)
        group, start, end = group[ranges], start[ranges], end[ranges]
        self._axis = Axis(group, start, end)
        by_start = np.lexsort((-end, start))
        # An interval that is painted later lies on top.
        order = by_start if latest else by_start[::-1]
        low, high = self._axis.place(group[order], start[order]), self._axis.place(group[order], end[order])
        self._boundaries = distinct(np.concatenate([low, high]))
        top = _paint(np.searchsorted(self._boundaries, low), np.searchsorted(self._boundaries, high))
        self._open = np.append(ranges[order], NONE)[top]

    def open_at(self, group: Ints, time: Ints) -> Ints:
        """Returns the index of the range that is open at each (group, time), -1 if none is; it has their shape."""
        segment = np.searchsorted(self._boundaries, self._axis.place(group, time), side="right") - 1
        return self._open[segment]  # before the first boundary this is the last entry, -1


def _paint(low: Ints, high: Ints) -> Ints:
    """Returns the number of the last interval [low, high) over each place, -1 if none covers it.

    The result has the shape (high.max() + 1,). Each interval is the union of two blocks whose length is the largest
    power of two that fits into it. Blocks are painted from the longest to the shortest, and each block passes its
    number on to its two halves. This takes n log n steps and no loop over the intervals.
    """
    length = int(high.max(initial=0)) + 1
    top = np.full(length, NONE, np.int64)
    number = np.arange(len(low))
    level = np.log2(np.maximum(high - low, 1)).astype(np.int64)
    for power in range(int(level.max(initial=0)), -1, -1):
        at_level = level == power
        np.maximum.at(top, low[at_level], number[at_level])
        np.maximum.at(top, high[at_level] - (1 << power), number[at_level])
        if power:
            half = 1 << (power - 1)
            top[half:] = np.maximum(top[half:], top[:-half].copy())
    return top


def is_in_any_range(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Bools:
    """Returns True for each (``at_group``, ``at_time``) at which any of the ranges is open."""
    is_open: Bools = count_open_ranges(group, start, end, at_group, at_time) > 0
    return is_open


def count_open_ranges(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Ints:
    """Counts the ranges that are open at each (``at_group``, ``at_time``): started ranges minus ended ranges."""
    axis = Axis(group, start, end)
    starts, ends = np.sort(axis.place(group, start)), np.sort(axis.place(group, end))
    place = axis.place(at_group, at_time)
    return np.searchsorted(starts, place, side="right") - np.searchsorted(ends, place, side="right")


def is_contained(group: Ints, start: Ints, end: Ints) -> Bools:
    """Returns True for each range that lies inside another range of its group; of two equal ones the second does."""
    order = np.lexsort((-end, start, group))
    place = Axis(group, end).place(group[order], end[order])
    # The furthest end so far. That of an earlier group has its place before all ends of this group.
    reached = np.maximum.accumulate(np.append(NONE, place))[:-1]
    inside = np.empty(len(order), np.bool_)
    inside[order] = reached >= place
    return inside


def merge_ranges(group: Integers, start: Ints, end: Ints) -> tuple[Integers, Ints, Ints]:
    """Joins the ranges of each group that touch or overlap, and returns (group, start, end)."""
    if not len(start):
        return group, start, end
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    axis = Axis(group, start, end)
    reached = np.maximum.accumulate(axis.place(group, end))
    first = np.flatnonzero(np.append(True, axis.place(group, start)[1:] > reached[:-1]))
    return group[first], start[first], np.maximum.reduceat(end, first)


def has_moments(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Bools:
    """Returns True for each interval that holds a moment of its group: ``start <= time < end``."""
    has_moment: Bools = count_moments(group, time, at_group, start, end) > 0
    return has_moment


def count_moments(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Ints:
    """Counts the moments (``group``, ``time``) in each interval (``at_group``, ``start``, ``end``) of their group."""
    axis = Axis(group, time)
    moments = np.sort(axis.place(group, time))
    first, stop = (np.searchsorted(moments, axis.place(at_group, bound)) for bound in (start, end))
    return stop - first


def find_last_before(group: Ints, time: Ints, at_group: Ints, end: Ints) -> Ints:
    """Returns the last moment of each group before an end; ``LONG_AGO`` if there is none."""
    axis = Axis(group, time)
    order = np.lexsort((time, group))
    before = np.searchsorted(axis.place(group, time)[order], axis.place(at_group, end))
    times, groups = np.append(LONG_AGO, time[order]), np.append(0, group[order])
    return np.where(groups[before] == at_group, times[before], LONG_AGO)


def measure_unions(group: Integers, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """Measures the time that the intervals of each group (0 to ``groups - 1``) cover; overlaps count once.

    Returns:
        Three arrays of shape (groups,), ns: covered time, first start, last end; 0 for a group without intervals.
    """
    covered, first, last = np.zeros((3, groups), np.int64)
    owner, begin, stop = merge_ranges(group, start, end)
    first_of_group = np.flatnonzero(np.diff(owner, prepend=NONE))
    if len(first_of_group):
        covered[owner[first_of_group]] = np.add.reduceat(stop - begin, first_of_group)
        first[owner[first_of_group]] = begin[first_of_group]
        last[owner] = stop  # the last assignment to a group is its last end
    return covered, first, last


@dataclass(frozen=True)
class Cover:
    """Sorted intervals that do not overlap, and how much of any other interval they cover.

    Attributes:
        start, end: shape (intervals,), ns.
        covered: shape (intervals + 1,), ns, the time that is covered before each interval starts, and the total.
    """

    start: Ints
    end: Ints
    covered: Ints

    @staticmethod
    def from_intervals(start: Ints, end: Ints) -> Cover:
        """Returns the union of intervals, which must be sorted by start."""
        if not len(start):
            return Cover(start, end, np.zeros(1, np.int64))
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.append(True, start[1:] > reached[:-1]))
        starts, ends = start[first], reached[np.append(first[1:] - 1, len(end) - 1)]
        return Cover(starts, ends, np.append(0, np.cumsum(ends - starts)))

    def covered_before(self, time: Ints) -> Ints:
        """Returns the time that is covered before each moment, ns."""
        if not len(self.start):
            return np.zeros(len(time), np.int64)
        started = np.searchsorted(self.start, time, side="right")  # the number of intervals that have started
        last = np.maximum(started - 1, 0)
        inside = np.where(started > 0, np.minimum(time, self.end[last]) - self.start[last], 0)
        return self.covered[last] + inside

    def covered_within(self, start: Ints, end: Ints) -> Ints:
        """Returns the time that is covered between each start and end, ns."""
        return self.covered_before(end) - self.covered_before(start)

    def find_gaps(self, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """Returns the uncovered parts of the intervals [start, end): (index of the interval, start, end) of each."""
        first = np.searchsorted(self.end, start, side="right")  # the first own interval that ends after the start
        last = np.searchsorted(self.start, end, side="left")  # the first own interval that starts after the end
        count = np.maximum(last - first, 0) + 1  # n own intervals inside leave at most n + 1 gaps
        owner = np.repeat(np.arange(len(start)), count)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        inside = first[owner] + number
        ends, starts = np.append(self.end, 0), np.append(self.start, 0)
        low = np.where(number == 0, start[owner], ends[np.maximum(inside - 1, 0)])
        high = np.where(number == count[owner] - 1, end[owner], starts[np.minimum(inside, len(self.start))])
        low, high = np.maximum(low, start[owner]), np.minimum(high, end[owner])
        is_gap = high > low
        return owner[is_gap], low[is_gap], high[is_gap]


def find_overlaps(start: Ints, end: Ints, at_start: Ints, at_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Finds where the intervals [start, end) overlap the intervals [at_start, at_end).

    The former must be sorted, and must not overlap each other.

    Returns:
        For each overlap: the index of the latter interval, the index of the former, the start and the end, ns.
    """
    first = np.searchsorted(end, at_start, side="right")
    count = np.maximum(np.searchsorted(start, at_end, side="left") - first, 0)
    owner = np.repeat(np.arange(len(at_start)), count)
    interval = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    low, high = np.maximum(start[interval], at_start[owner]), np.minimum(end[interval], at_end[owner])
    is_common = high > low
    return owner[is_common], interval[is_common], low[is_common], high[is_common]


class Axis:
    """Places values of several groups on one axis: group after group, and sorted by value within each group.

    Each group takes a stretch that is as long as its values need. If the values lie too far apart for 64 bits, for
    example because a time is broken, each value is replaced by its rank among all values.
    """

    def __init__(self, group: Ints, *values: Ints) -> None:
        self._groups = distinct(group)
        if not len(self._groups):
            return  # nothing has a place
        self._last = len(self._groups) - 1
        self._low = min(int(column.min()) for column in values)
        self._high = max(int(column.max()) for column in values)
        self._stretch = self._high - self._low + 3  # with a place before the first value and one after the last
        self._ranked: Ints | None = None
        if self._stretch * len(self._groups) > _MAX_AXIS_LENGTH:
            self._ranked = distinct(np.concatenate(values))
            self._stretch = 2 * len(self._ranked) + 1  # with a place between any two values

    def place(self, group: Integers, value: Ints) -> Ints:
        """Returns the place of each (group, value), sorted by group, then by value; ``OFF_AXIS`` for unknown groups.

        A value that is not on the axis gets a place between its neighbors on the axis.
        """
        places = np.full(len(group), OFF_AXIS, np.int64)
        for block in blocks(len(group) if len(self._groups) else 0):
            places[block] = self._place_block(group[block], value[block])
        return places

    def _place_block(self, group: Integers, value: Ints) -> Ints:
        group = group.astype(np.int64)  # the product below would overflow narrower integers
        if not self._last:
            return np.where(group == self._groups[0], self._place_in_stretch(value), OFF_AXIS)
        code = np.searchsorted(self._groups, group).clip(0, self._last)
        place = code * self._stretch + self._place_in_stretch(value)
        return np.where(self._groups[code] == group, place, OFF_AXIS)

    def _place_in_stretch(self, value: Ints) -> Ints:
        """Returns the place of each value within the stretch of its group."""
        if self._ranked is None:
            limits = np.iinfo(np.int64)
            return value.clip(max(self._low - 1, limits.min), min(self._high + 1, limits.max)) - self._low + 1
        # An even place is a gap between two values, an odd place is a value.
        return np.searchsorted(self._ranked, value) + np.searchsorted(self._ranked, value, side="right")
