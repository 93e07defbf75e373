"""Intervals that do not overlap, and how much of any stretch they cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Ints


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

    def inside(self, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """What is covered of some stretches: (position of the stretch, of the interval, start, end) of each part."""
        first = np.searchsorted(self.end, start, side="right")
        count = np.maximum(np.searchsorted(self.start, end, side="left") - first, 0)
        owner = np.repeat(np.arange(len(start)), count)
        interval = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        low, high = np.maximum(self.start[interval], start[owner]), np.minimum(self.end[interval], end[owner])
        kept = high > low
        return owner[kept], interval[kept], low[kept], high[kept]
