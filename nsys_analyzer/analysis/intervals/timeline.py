"""Ranges open at a moment, ranges that lie in others, and the time that intervals cover.

Ranges may cross. Between two boundaries the answer is constant, so that n ranges make at most 2·n segments.
"""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.intervals.axis import OFF_AXIS, Axis
from nsys_analyzer.trace.arrays import Bools, Integers, Ints, SmallInts, blocks, distinct

NONE = -1
#: Before every moment of a trace.
LONG_AGO = -(2**62)


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
        found = np.empty(len(time), np.int64)
        for block in blocks(len(time)):
            place = self._axis.place(group[block], time[block])
            segment = np.searchsorted(self._boundaries, place, side="right") - 1
            found[block] = self._open[segment]  # before the first boundary: the last entry, -1
        return found


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


def open_count(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> SmallInts:
    """The number of ranges open at each (group, time): those started less those ended."""
    axis = Axis(group, start, end)
    starts, ends = np.sort(axis.place(group, start)), np.sort(axis.place(group, end))
    count = np.empty(len(at_time), np.int32)
    for block in blocks(len(at_time)):
        place = axis.place(at_group[block], at_time[block])
        count[block] = np.searchsorted(starts, place, side="right") - np.searchsorted(ends, place, side="right")
    return count


def contained(group: Ints, start: Ints, end: Ints) -> Bools:
    """True for the ranges that lie inside another one of their group; of two equal ones the second does."""
    order = np.lexsort((-end, start, group))
    place = Axis(group, end).place(group[order], end[order])
    reached = np.maximum.accumulate(np.append(NONE, place))[:-1]  # of another group: before any of this one
    inside = np.empty(len(order), np.bool_)
    inside[order] = reached >= place
    return inside


def merged(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
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
    axis = Axis(group, time)
    moments = np.sort(axis.place(group, time))
    first, behind = (np.searchsorted(moments, axis.place(at_group, bound)) for bound in (start, end))
    holds: Bools = behind > first
    return holds


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
    covered, first, last = (np.zeros(groups, np.int64) for _ in range(3))
    if not len(start):
        return covered, first, last
    # Groups lie one behind the other on the axis, so that one sort and one running maximum serve all.
    axis = Axis(np.arange(groups), start, end)
    begin = axis.place(group, start)
    order = np.argsort(begin, kind="stable") if (begin[1:] < begin[:-1]).any() else None
    before, reached = np.int64(NONE), np.int64(OFF_AXIS)  # the last group so far, and its latest end
    for block in blocks(len(begin)):
        some = block if order is None else order[block]
        owner, begun, ended = group[some], begin[some], axis.place(group[some], end[some])
        opens = np.append(owner[0] != before, owner[1:] != owner[:-1])
        first[owner[opens]] = axis.value(begun[opens])
        latest = np.maximum(np.maximum.accumulate(ended), reached)
        # What is covered already; of another group all lies before.
        begun = np.maximum(begun, np.append(reached, latest[:-1]))
        opens[0] = True
        at = np.flatnonzero(opens)
        covered[owner[at]] += np.add.reduceat(axis.length(begun, np.maximum(ended, begun)), at)
        last[owner[at]] = axis.value(latest[np.append(at[1:], len(owner)) - 1])
        before, reached = owner[-1], latest[-1]
    return covered, first, last
