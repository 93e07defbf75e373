"""One axis of integers for values of several groups, such as the times of several threads, exact for any 64-bit value.

One sort, one search or one running maximum then serves all groups at once.
"""

from __future__ import annotations

import numpy as np

from nsys_analyzer.trace.arrays import Integers, Ints, blocks, distinct

#: The place of a value whose group is not on the axis: before all others.
OFF_AXIS = -1
_LONGEST = 1 << 62


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
        self._is_numbered = self._groups[0] == 0 and self._groups[-1] == self._last
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
        # Groups from 0 on, as instances are, need no search.
        code = group if self._is_numbered else np.searchsorted(self._groups, group)
        code = code.clip(0, self._last)
        return np.where(self._groups[code] == group, code * self._stretch + self._inside(value), OFF_AXIS)

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
            limits = np.iinfo(np.int64)
            return value.clip(max(self._low - 1, limits.min), min(self._high + 1, limits.max)) - self._low + 1
        # An even place is a gap between two values, an odd one a value.
        return np.searchsorted(self._ranked, value) + np.searchsorted(self._ranked, value, side="right")
