"""Which of some ranges is open at a moment: the one opened first, or last, on a thread or in a process.

Ranges of one thread may cross (start/end ranges), those of several threads do. The answer is constant between two
boundaries all the same, so that n ranges make at most 2·n segments, however they cross.
"""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.axis import Axis
from nsys_analyzer.trace.arrays import Bools, Ints

NONE = -1
#: Before every moment of a trace.
LONG_AGO = -(2**62)


class Timeline:
    """The range open at each moment of each group: ``start <= time < end``.

    Args:
        group: shape (ranges,), the thread or process of each range.
        start, end: shape (ranges,), ns.
        latest: whether the one opened last answers, or the one opened first. Of two that open together the longer
            one opens first.
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
        self._open = np.where(top == NONE, NONE, ranges[order][top]) if len(ranges) else top

    def at(self, group: Ints, time: Ints) -> Ints:
        """The range open at each (group, time), shape as theirs; -1 where none is."""
        if not len(self._boundaries):
            return np.full(len(time), NONE, np.int64)
        place = self._axis.place(group, time)
        segment = np.searchsorted(self._boundaries, place, side="right") - 1
        return np.where((place >= 0) & (segment >= 0), self._open[segment], NONE)


def _paint(low: Ints, high: Ints) -> Ints:
    """Paints the intervals [low, high) one over the other, in order; the number of the top one, -1 where none is.

    An interval is the union of two blocks whose length is the largest power of two it holds. Blocks are painted from
    the longest to the shortest, each length handing what it has to its halves: n log n, and no loop over intervals.

    Returns:
        Shape (high.max(),): the last one is -1, since every interval ends before it.
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
    """Whether any of the ranges is open at each (group, time)."""
    opened: Bools = open_count(group, start, end, at_group, at_time) > 0
    return opened


def open_count(group: Ints, start: Ints, end: Ints, at_group: Ints, at_time: Ints) -> Ints:
    """How many of the ranges are open at each (group, time): those started less those ended."""
    ranges = np.flatnonzero(end > start)
    group, start, end = group[ranges], start[ranges], end[ranges]
    axis = Axis(group, start, end)
    place = axis.place(at_group, at_time)
    started = np.searchsorted(np.sort(axis.place(group, start)), place, side="right")
    ended = np.searchsorted(np.sort(axis.place(group, end)), place, side="right")
    return started - ended


def contained(group: Ints, start: Ints, end: Ints) -> Bools:
    """True for the ranges that lie inside another one of their group; of two equal ones the second does."""
    order = np.lexsort((-end, start, group))
    ordered_end, ordered_group = end[order], group[order]
    inside = np.zeros(len(order), np.bool_)
    if len(order):
        axis = Axis(group, start, end)
        place = axis.place(ordered_group, ordered_end)
        reached = np.concatenate([[NONE], np.maximum.accumulate(place)[:-1]])
        first = np.concatenate([[True], ordered_group[1:] != ordered_group[:-1]])
        inside[order] = (reached >= place) & ~first
    return inside


def merged(group: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """The ranges of each group joined where they touch or overlap: (group, start, end)."""
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    if not len(order):
        return group, start, end
    axis = Axis(group, start, end)
    reached = np.maximum.accumulate(axis.place(group, end))
    fresh = np.concatenate([[True], (axis.place(group, start)[1:] > reached[:-1]) | (group[1:] != group[:-1])])
    first = np.flatnonzero(fresh)
    return group[first], start[first], np.maximum.reduceat(end, first)


def count_within(group: Ints, time: Ints, at_group: Ints, start: Ints, end: Ints) -> Ints:
    """How many of the moments lie in each interval of their group: ``start <= time < end``."""
    axis = Axis(group, time)
    moments = np.sort(axis.place(group, time))
    return np.searchsorted(moments, axis.place(at_group, end)) - np.searchsorted(moments, axis.place(at_group, start))


def last_before(group: Ints, time: Ints, at_group: Ints, end: Ints) -> Ints:
    """The last of the moments of each group before an end; far in the past where there is none."""
    axis = Axis(group, time)
    place = axis.place(group, time)
    order = np.argsort(place, kind="stable")
    found = np.searchsorted(place[order], axis.place(at_group, end)) - 1
    hit = (found >= 0) & (group[order][found] == at_group) if len(time) else np.zeros(len(end), np.bool_)
    return np.where(hit, time[order][found], LONG_AGO) if len(time) else np.full(len(end), LONG_AGO)
