"""Computes statistics of a figure over several instances or steps, for all parts of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: The most values of a figure that a summary keeps. A sample of this size shows the spread of a median well enough.
MOST_VALUES = 200
#: The statistics that move with the values. The standard deviation does not.
_LOCATIONS = ("mean", "min", "median", "max")


@dataclass(frozen=True)
class Stats:
    """Statistics of a figure over ``n`` instances, in the unit of the field that holds them.

    All are None without instances; ``n`` is None if it is not known. ``std`` is the sample standard deviation (n - 1),
    None below two instances.
    """

    n: int | None = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    median: float | None = None
    max: float | None = None

    @property
    def typical(self) -> float | None:
        """Returns the median, which one slow instance does not move; without a median, the mean."""
        return self.mean if self.median is None else self.median

    def shifted(self, by: float) -> Stats:
        """Returns the statistics of the values after adding ``by`` to each."""
        locations = {key: None if (value := getattr(self, key)) is None else value + by for key in _LOCATIONS}
        return replace(self, **locations)

    @staticmethod
    def of_ns(values: Ints | Sequence[int]) -> Stats:
        """Returns the statistics in ms of durations in ns."""
        ms = np.asarray(values, np.float64) / NS_PER_MS
        if not len(ms):
            return Stats()
        std = float(ms.std(ddof=1)) if len(ms) > 1 else None
        return Stats(len(ms), float(ms.mean()), std, float(ms.min()), float(np.median(ms)), float(ms.max()))


def sample_ms(durations_ns: Ints) -> tuple[float, ...]:
    """Returns durations in ms: each of them, or an evenly spread sample of ``MOST_VALUES`` if there are more."""
    count = min(len(durations_ns), MOST_VALUES)
    places = np.linspace(0, len(durations_ns) - 1, count).round().astype(np.int64)
    return tuple((durations_ns[places] / NS_PER_MS).tolist())


class Moments:
    """Collects the time of each kind of activity in each step, and returns its mean and standard deviation over steps.

    Attributes:
        total: the sum over all steps for each kind, in ns.
        squares: the sum of the squares of the steps' times.
        typical: the sum over the steps near the median, from which the reported means are computed.
        steps, near: the numbers of all steps and of steps near the median.
    """

    def __init__(self, kinds: int) -> None:
        self.total, self.squares, self.typical = np.zeros((3, kinds))
        self.steps = self.near = 0

    def add(self, step: Ints, kind: Ints, ns: Ints | Floats, near: Bools) -> None:
        """Adds pieces of complete steps.

        Args:
            step, kind, ns: the step, kind and duration of each piece, shape (pieces,).
            near: whether each step is near the median, shape (steps,).
        """
        kinds = len(self.total)
        keys, key = np.unique(step * kinds + kind, return_inverse=True)
        sums = np.bincount(key, ns, len(keys))
        self.total += np.bincount(keys % kinds, sums, kinds)
        self.squares += np.bincount(keys % kinds, sums * sums, kinds)
        self.typical += np.bincount(keys % kinds, sums * near[keys // kinds], kinds)
        self.steps, self.near = self.steps + len(near), self.near + int(near.sum())

    def of(self, scale: float) -> list[tuple[float, float | None]]:
        """Returns the mean over the steps near the median, and the standard deviation over all steps, for each kind.

        Both are in ms and multiplied by ``scale``. A single step has no standard deviation.
        """
        scale /= NS_PER_MS
        means = (self.typical / self.near * scale).tolist()
        if self.steps < 2:
            return [(mean, None) for mean in means]
        std = np.sqrt(np.maximum(self.squares - self.total * self.total / self.steps, 0) / (self.steps - 1))
        return list(zip(means, (std * scale).tolist(), strict=True))
