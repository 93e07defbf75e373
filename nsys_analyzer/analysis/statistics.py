"""Statistics of a figure over several instances or steps: what every room of the analysis shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: The most values of a figure that a summary keeps: as many show the spread of a median as well as all of them.
MOST_VALUES = 200
#: The statistics that move with the values. The standard deviation does not.
_LOCATIONS = ("mean", "min", "median", "max")


@dataclass(frozen=True)
class Stats:
    """Statistics of a figure over ``n`` instances (None: unknown), in the unit of the field that holds it.

    ``std`` is the sample standard deviation (n - 1), None below two instances; all are None without any.
    """

    n: int | None = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    median: float | None = None
    max: float | None = None

    @property
    def typical(self) -> float | None:
        """The median, else the mean: one slow instance moves the mean of a few."""
        return self.mean if self.median is None else self.median

    def shifted(self, by: float) -> Stats:
        """The statistics of values that are so much larger."""
        moved = {key: None if (value := getattr(self, key)) is None else value + by for key in _LOCATIONS}
        return replace(self, **moved)

    @staticmethod
    def of_ns(values: Ints | Sequence[int]) -> Stats:
        """Statistics in ms of durations in ns."""
        ms = np.asarray(values, np.float64) / NS_PER_MS
        if not len(ms):
            return Stats()
        std = float(ms.std(ddof=1)) if len(ms) > 1 else None
        return Stats(len(ms), float(ms.mean()), std, float(ms.min()), float(np.median(ms)), float(ms.max()))


def values_ms(values: Ints) -> tuple[float, ...]:
    """Durations in ns as ms, one by one; of more than ``MOST_VALUES`` so many, evenly spread."""
    count = min(len(values), MOST_VALUES)
    chosen = np.linspace(0, len(values) - 1, count).round().astype(np.int64)
    return tuple((values[chosen] / NS_PER_MS).tolist())


class Moments:
    """Sums and sums of squares, over steps, of the time that each step holds of each kind, ns.

    Attributes:
        typical: the sums over the steps near the median alone, whose means are reported: ``near`` of ``steps``.
    """

    def __init__(self, kinds: int) -> None:
        self.total, self.squares, self.typical = np.zeros((3, kinds))
        self.steps = self.near = 0

    def add(self, step: Ints, kind: Ints, ns: Ints | Floats, near: Bools) -> None:
        """Adds the pieces of whole steps, shape (pieces,); ``near``, by step number, marks those near the median."""
        kinds = len(self.total)
        keys, key = np.unique(step * kinds + kind, return_inverse=True)
        sums = np.bincount(key, ns, len(keys))
        self.total += np.bincount(keys % kinds, sums, kinds)
        self.squares += np.bincount(keys % kinds, sums * sums, kinds)
        self.typical += np.bincount(keys % kinds, sums * near[keys // kinds], kinds)
        self.steps, self.near = self.steps + len(near), self.near + int(near.sum())

    def of(self, scale: float) -> list[tuple[float, float | None]]:
        """Returns each kind's mean over the steps near the median, and its standard deviation over all steps.

        Both are in ms, times ``scale``. A single step has no standard deviation.
        """
        scale /= NS_PER_MS
        means = (self.typical / self.near * scale).tolist()
        if self.steps < 2:
            return [(mean, None) for mean in means]
        std = np.sqrt(np.maximum(self.squares - self.total * self.total / self.steps, 0) / (self.steps - 1))
        return list(zip(means, (std * scale).tolist(), strict=True))
