"""Ranges open at a moment, ranges that lie in others, and the time that intervals cover.

Ranges may cross. Between two boundaries the answer is constant, so that n ranges make at most 2·n segments.
"""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.intervals.axis import Axis
from nsys_analyzer.trace.arrays import Bools, Ints

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
        self._boundaries = np.unique(np.concatenate([low, high]))
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
    place = axis.place(at_group, at_time)
    started = np.searchsorted(np.sort(axis.place(group, start)), place, side="right")
    ended = np.searchsorted(np.sort(axis.place(group, end)), place, side="right")
    return started - ended


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


def unions(group: Ints, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """The time covered by the intervals of each group (0 to ``groups - 1``), overlaps counted once, and its bounds.

    Returns:
        Three arrays of shape (groups,), ns: covered time, first start, last end; 0 for a group without intervals.
    """
    covered, first, last = (np.zeros(groups, np.int64) for _ in range(3))
    if not len(start):
        return covered, first, last
    # Groups lie one behind the other on the axis, so that one sort and one running maximum serve all.
    axis = Axis(np.arange(groups), start, end)
    begin, finish = axis.place(group, start), axis.place(group, end)
    order = np.argsort(begin, kind="stable")
    begin, finish, ordered = begin[order], finish[order], group[order]
    reached = np.maximum.accumulate(finish)
    begin[1:] = np.maximum(begin[1:], reached[:-1])  # what is covered already; of another group all lies before
    fresh = axis.length(begin, np.maximum(finish, begin))
    at = np.flatnonzero(np.diff(ordered, prepend=-1))
    seen = ordered[at]
    covered[seen] = np.add.reduceat(fresh, at)
    first[seen] = start[order[at]]
    last[seen] = axis.value(reached[np.append(at[1:], len(order)) - 1])
    return covered, first, last
