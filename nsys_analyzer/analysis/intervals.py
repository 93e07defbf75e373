"""Intervals of integers: the ranges open at a moment, ranges that lie in others, and the time that intervals cover.

Ranges may cross. Between two boundaries the answer is constant, so that n ranges make at most 2·n segments. Values of
several groups, such as the times of several threads, lie on one axis, exact for any 64-bit value: one sort, one search
or one running maximum then serves all groups at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, blocks, distinct

NONE = -1
#: Before every moment of a trace.
LONG_AGO = -(2**62)
#: The place of a value whose group is not on the axis: before all others.
OFF_AXIS = -1
_LONGEST = 1 << 62


class Timeline:
    """The range open at each moment of each group: ``start <= time < end``.

    Args:
        group: shape (ranges,), the thread or process of each range.
        start, end: shape (ranges,), ns.
        latest: take the range opened last, not the one opened first; of two that open together the longer is first.
    """

    def __init__(self, group: Ints, start: Ints, end: Ints, *, latest: bool) -> None:
        ranges = np.flatnonzero(end > start)
        group, start, end = group[ranges], start[ranges], end[ranges]
        self._axis = Axis(group, start, end)
        opened = np.lexsort((-end, start))
        # What is painted later lies on top.
        order = opened if latest else opened[::-1]
        low, high = self._axis.place(group[order], start[order]), self._axis.place(group[order], end[order])
        self._boundaries = distinct(np.concatenate([low, high]))
        top = _paint(np.searchsorted(self._boundaries, low), np.searchsorted(self._boundaries, high))
        self._open = np.append(ranges[order], NONE)[top]

    def at(self, group: Ints, time: Ints) -> Ints:
        """The range open at each (group, time), shape as theirs; -1 where none is."""
        segment = np.searchsorted(self._boundaries, self._axis.place(group, time), side="right") - 1
        return self._open[segment]  # before the first boundary: the last entry, -1


def _paint(low: Ints, high: Ints) -> Ints:
    """Shape (high.max() + 1,): the number of the last interval [low, high) over each place, -1 where none is.

    An interval is the union of two blocks whose length is the largest power of two it holds. Blocks are painted from
    the longest to the shortest, each length handing what it has to its halves: n log n, and no loop over intervals.
    """
    length = int(high.max(initial=0)) + 1
    top = np.full(length, NONE, np.int64)
    number = np.arange(len(low))
    level = np.log2(np.maximum(high - low, 1)).astype(np.int64)
    for power in range(int(level.max(initial=0)), -1, -1):
        here = level == power
        np.maximum.at(top, low[here], number[here])
        np.maximum.at(top, high[here] - (1 << power), number[here])
        if power:
            half = 1 << (power - 1)
            top[half:] = np.maximum(top[half:], top[:-half].copy())
    return top


def any_open(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Bools:
    """True where any of the ranges is open at (group, time)."""
    opened: Bools = open_count(group, start, end, at_group, at_time) > 0
    return opened


def open_count(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Ints:
    """The number of ranges open at each (group, time): those started less those ended."""
    axis = Axis(group, start, end)
    starts, ends = np.sort(axis.place(group, start)), np.sort(axis.place(group, end))
    place = axis.place(at_group, at_time)
    return np.searchsorted(starts, place, side="right") - np.searchsorted(ends, place, side="right")


def contained(group: Ints, start: Ints, end: Ints) -> Bools:
    """True for the ranges that lie inside another one of their group; of two equal ones the second does."""
    order = np.lexsort((-end, start, group))
    place = Axis(group, end).place(group[order], end[order])
    reached = np.maximum.accumulate(np.append(NONE, place))[:-1]  # of another group: before any of this one
    inside = np.empty(len(order), np.bool_)
    inside[order] = reached >= place
    return inside


def merged(group: Integers, start: Ints, end: Ints) -> tuple[Integers, Ints, Ints]:
    """The ranges of each group joined where they touch or overlap: (group, start, end)."""
    if not len(start):
        return group, start, end
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    axis = Axis(group, start, end)
    reached = np.maximum.accumulate(axis.place(group, end))
    first = np.flatnonzero(np.append(True, axis.place(group, start)[1:] > reached[:-1]))
    return group[first], start[first], np.maximum.reduceat(end, first)


def holds_any(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Bools:
    """True for the intervals in which any of their group's moments lies: ``start <= time < end``."""
    holds: Bools = held(group, time, at_group, start, end) > 0
    return holds


def held(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Ints:
    """The number of their group's moments in each interval."""
    axis = Axis(group, time)
    moments = np.sort(axis.place(group, time))
    first, behind = (np.searchsorted(moments, axis.place(at_group, bound)) for bound in (start, end))
    return behind - first


def last_before(group: Ints, time: Ints, at_group: Ints, end: Ints) -> Ints:
    """The last of the moments of each group before an end; far in the past where there is none."""
    axis = Axis(group, time)
    order = np.lexsort((time, group))
    before = np.searchsorted(axis.place(group, time)[order], axis.place(at_group, end))
    times, groups = np.append(LONG_AGO, time[order]), np.append(0, group[order])
    return np.where(groups[before] == at_group, times[before], LONG_AGO)


def unions(group: Integers, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """The time covered by the intervals of each group (0 to ``groups - 1``), overlaps counted once, and its bounds.

    Returns:
        Three arrays of shape (groups,), ns: covered time, first start, last end; 0 for a group without intervals.
    """
    covered, first, last = np.zeros((3, groups), np.int64)
    owner, begun, ended = merged(group, start, end)
    opens = np.flatnonzero(np.diff(owner, prepend=NONE))
    if len(opens):
        covered[owner[opens]] = np.add.reduceat(ended - begun, opens)
        first[owner[opens]], last[owner] = begun[opens], ended  # of several ends the last stays
    return covered, first, last


@dataclass(frozen=True)
class Cover:
    """Intervals that do not overlap, in order, and how much of any stretch they cover."""

    start: Ints
    end: Ints
    before: Ints

    @staticmethod
    def of(start: Ints, end: Ints) -> Cover:
        """The union of intervals whose starts are in order."""
        if not len(start):
            return Cover(start, end, np.zeros(1, np.int64))
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.append(True, start[1:] > reached[:-1]))
        starts, ends = start[first], reached[np.append(first[1:] - 1, len(end) - 1)]
        return Cover(starts, ends, np.append(0, np.cumsum(ends - starts)))

    def until(self, time: Ints) -> Ints:
        """The time covered before each moment, ns."""
        if not len(self.start):
            return np.zeros(len(time), np.int64)
        begun = np.searchsorted(self.start, time, side="right")  # the intervals that have begun
        last = np.maximum(begun - 1, 0)
        inside = np.where(begun > 0, np.minimum(time, self.end[last]) - self.start[last], 0)
        return self.before[last] + inside

    def within(self, start: Ints, end: Ints) -> Ints:
        """The time covered in each stretch, ns."""
        return self.until(end) - self.until(start)

    def without(self, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """What is not covered of some stretches: (position of the stretch, start, end) of each part of them."""
        first = np.searchsorted(self.end, start, side="right")  # the first interval that ends behind its start
        last = np.searchsorted(self.start, end, side="left")  # the first one that begins behind its end
        count = np.maximum(last - first, 0) + 1  # one part more than there are intervals inside
        owner = np.repeat(np.arange(len(start)), count)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        inside = first[owner] + number
        ends, starts = np.append(self.end, 0), np.append(self.start, 0)
        low = np.where(number == 0, start[owner], ends[np.maximum(inside - 1, 0)])
        high = np.where(number == count[owner] - 1, end[owner], starts[np.minimum(inside, len(self.start))])
        low, high = np.maximum(low, start[owner]), np.minimum(high, end[owner])
        kept = high > low
        return owner[kept], low[kept], high[kept]


def overlaps(start: Ints, end: Ints, at_start: Ints, at_end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """What intervals in order, none of which overlap, have in common with some stretches.

    Returns:
        For each part in common the position of its stretch, that of its interval, its start and its end.
    """
    first = np.searchsorted(end, at_start, side="right")
    count = np.maximum(np.searchsorted(start, at_end, side="left") - first, 0)
    owner = np.repeat(np.arange(len(at_start)), count)
    interval = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    low, high = np.maximum(start[interval], at_start[owner]), np.minimum(end[interval], at_end[owner])
    kept = high > low
    return owner[kept], interval[kept], low[kept], high[kept]


class Axis:
    """Values of several groups (any integers), group after group, in the order of the values within each.

    A group takes a stretch as long as its values need. Where the values lie too far apart for 64 bits, as times do
    when one of them is broken, a value's rank among all of them stands for it.
    """

    def __init__(self, group: Ints, *values: Ints) -> None:
        self._groups = distinct(group)
        if not len(self._groups):
            return  # nothing has a place
        self._last = len(self._groups) - 1
        self._low = min(int(column.min()) for column in values)
        self._high = max(int(column.max()) for column in values)
        self._stretch = self._high - self._low + 3  # with a place before the first value and one behind the last
        self._ranked: Ints | None = None
        if self._stretch * len(self._groups) > _LONGEST:
            self._ranked = distinct(np.concatenate(values))
            self._stretch = 2 * len(self._ranked) + 1  # with a place between any two values

    def place(self, group: Integers, value: Ints) -> Ints:
        """Where each (group, value) lies: in the order of group, then value; ``OFF_AXIS`` for an unknown group.

        A value that is not on the axis has its place before, between or behind those that are.
        """
        places = np.full(len(group), OFF_AXIS, np.int64)
        for block in blocks(len(group) if len(self._groups) else 0):
            places[block] = self._place(group[block], value[block])
        return places

    def _place(self, group: Integers, value: Ints) -> Ints:
        group = group.astype(np.int64)  # a product of narrow ones overflows
        if not self._last:
            return np.where(group == self._groups[0], self._inside(value), OFF_AXIS)
        code = np.searchsorted(self._groups, group).clip(0, self._last)
        return np.where(self._groups[code] == group, code * self._stretch + self._inside(value), OFF_AXIS)

    def _inside(self, value: Ints) -> Ints:
        """The place of each value within its group's stretch."""
        if self._ranked is None:
            limits = np.iinfo(np.int64)
            return value.clip(max(self._low - 1, limits.min), min(self._high + 1, limits.max)) - self._low + 1
        # An even place is a gap between two values, an odd one a value.
        return np.searchsorted(self._ranked, value) + np.searchsorted(self._ranked, value, side="right")
