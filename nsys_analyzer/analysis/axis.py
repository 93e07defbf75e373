"""One axis of integers for values of several groups, such as the times of several threads, exact for any 64-bit value.

One sort, one search or one running maximum then serves all groups at once.
"""

from __future__ import annotations

import numpy as np

from nsys_analyzer.trace.arrays import Ints, distinct

#: The place of a value whose group is not on the axis: before all others.
OFF_AXIS = -1
_LONGEST = 1 << 62
#: Groups that may be missing among others, besides as many as there are.
_FEW = 1_000


class Axis:
    """Values of several groups, group after group, in the order of the values within each.

    A group takes a stretch as long as its values need. Where the values lie too far apart for 64 bits, as times do
    when one of them is broken, a value's rank among all of them stands for it.

    Args:
        group: shape (n,), the group of each value: threads, processes, or any integers.
        values: arrays of shape (n,), such as the starts and the ends of ranges.
    """

    def __init__(self, group: Ints, *values: Ints) -> None:
        self._groups = distinct(group)
        self._first = int(self._groups[0]) if len(self._groups) else 0
        span = int(self._groups[-1]) - self._first + 1 if len(self._groups) else 0
        # Numbers that lie close together, as those of instances do, need no search.
        self._dense = span <= 2 * len(self._groups) + _FEW
        self._slots = span if self._dense else len(self._groups)
        self._low = min((int(column.min()) for column in values if len(column)), default=0)
        self._high = max((int(column.max()) for column in values if len(column)), default=0)
        self._stretch = self._high - self._low + 3  # with a place before the first value and one behind the last
        self._ranked: Ints | None = None
        if self._stretch * (self._slots + 1) > _LONGEST:
            self._ranked = np.unique(np.concatenate(values))
            self._stretch = 2 * len(self._ranked) + 1  # with a place between any two values

    def place(self, group: Ints, value: Ints) -> Ints:
        """Where each (group, value) lies: in the order of group, then value; ``OFF_AXIS`` for an unknown group.

        A value that is not on the axis has its place before, between or behind those that are.
        """
        if not len(self._groups):
            return np.full(len(group), OFF_AXIS, np.int64)
        if self._dense:
            code = group - self._first
            known = (code >= 0) & (code < self._slots)
            if self._slots > len(self._groups):
                is_group = np.zeros(self._slots, np.bool_)
                is_group[self._groups - self._first] = True
                known &= is_group[code.clip(0, self._slots - 1)]
        else:
            code = np.searchsorted(self._groups, group).clip(max=len(self._groups) - 1)
            known = self._groups[code] == group
        placed: Ints = code * self._stretch + self._inside(value)
        return placed if known.all() else np.where(known, placed, OFF_AXIS)

    def place_own(self, group: Ints, value: Ints) -> Ints:
        """The places of groups and values that the axis was made of: what ``place`` gives, without its checks."""
        if self._ranked is not None or not self._dense:
            return self.place(group, value)
        own: Ints = (group - self._first) * self._stretch + (value - self._low + 1)
        return own

    def length(self, first: Ints, last: Ints) -> Ints:
        """The difference of the values at pairs of places, each of one group, below 0 where the last is before."""
        return last - first if self._ranked is None else self.value(last) - self.value(first)

    def value(self, place: Ints) -> Ints:
        """The value at each place of one that is on the axis."""
        inside = place % self._stretch
        return inside - 1 + self._low if self._ranked is None else self._ranked[inside // 2]

    def _inside(self, value: Ints) -> Ints:
        """The place of each value within its group's stretch."""
        if self._ranked is None:
            if len(value) and value.min() >= self._low and value.max() <= self._high:
                return value - self._low + 1
            limits = np.iinfo(np.int64)
            return value.clip(max(self._low - 1, limits.min), min(self._high + 1, limits.max)) - self._low + 1
        # An even place is a gap between two values, an odd one a value.
        return np.searchsorted(self._ranked, value) + np.searchsorted(self._ranked, value, side="right")
