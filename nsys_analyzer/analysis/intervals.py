"""Lengths of unions of intervals, group by group."""

from __future__ import annotations

import numpy as np

from nsys_analyzer.trace.arrays import Ints


def union_length(group: Ints, start: Ints, end: Ints, groups: int) -> Ints:
    """The time covered by the intervals of each group, overlaps counted once.

    Args:
        group: shape (n,), from 0 to ``groups - 1``.
        start, end: shape (n,), ns.
        groups: how many groups there are.

    Returns:
        Shape (groups,), ns; 0 for a group without intervals.

    """
    covered = np.zeros(groups, np.int64)
    if not len(start):
        return covered
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    # Each group is shifted beyond the one before it, so that one running maximum serves all.
    span = int(end.max() - start.min()) + 1
    shift = group * span - int(start.min())
    reached = np.maximum.accumulate(end + shift)
    before = np.concatenate([[np.iinfo(np.int64).min], reached[:-1]])
    fresh = np.maximum(end + shift - np.maximum(start + shift, before), 0)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    covered[group[first]] = np.add.reduceat(fresh, first)
    return covered


def group_sum(group: Ints, values: Ints, groups: int) -> Ints:
    """Sums of integers by group; shape (groups,). Exact while a sum is below 2**53 (104 days in ns)."""
    return np.bincount(group, weights=values, minlength=groups).astype(np.int64)


def group_bounds(group: Ints, start: Ints, end: Ints, groups: int) -> tuple[Ints, Ints]:
    """The first start and the last end of each group; both 0 for a group without intervals."""
    first, last = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    at = np.flatnonzero(np.diff(ordered, prepend=-1))
    if len(at):
        first[ordered[at]] = np.minimum.reduceat(start[order], at)
        last[ordered[at]] = np.maximum.reduceat(end[order], at)
    return first, last
