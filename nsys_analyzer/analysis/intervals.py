"""Sums and unions of intervals, group by group."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.analysis.axis import Axis
from nsys_analyzer.trace.arrays import Ints


def unions(group: Ints, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints, Ints]:
    """The time covered by the intervals of each group, overlaps counted once, and its bounds.

    Args:
        group: shape (n,), from 0 to ``groups - 1``.
        start, end: shape (n,), ns; any whose differences fit 64 bits.
        groups: how many groups there are.

    Returns:
        Three arrays of shape (groups,), ns: covered time, first start, last end; 0 for a group without intervals.
    """
    covered, first, last = (np.zeros(groups, np.int64) for _ in range(3))
    if not len(start):
        return covered, first, last
    # Groups lie one behind the other on the axis, so that one sort and one running maximum serve all.
    axis = Axis(group, start, end)
    begin, finish = axis.place_own(group, start), axis.place_own(group, end)
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


def group_sum(group: Ints, values: Ints, groups: int) -> Ints:
    """Sums of integers by group; shape (groups,). Exact while a sum is below 2**53 (104 days in ns)."""
    return np.bincount(group, weights=values, minlength=groups).astype(np.int64)
