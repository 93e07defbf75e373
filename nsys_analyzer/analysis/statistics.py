"""Computes statistics of a figure over several instances or steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Floats, Ints
from nsys_analyzer.trace.schema import NS_PER_MS

#: The maximum number of values of a figure in a summary. A sample of this size suffices for the spread of a median.
MAX_SAMPLE_VALUES = 200
#: The statistics that increase by a constant if the constant is added to all values.
_LOCATION_STATISTICS = ("mean", "min", "median", "max")


@dataclass(frozen=True)
class Stats:
    """Statistics of a figure over ``n`` instances, in the unit of the figure.

    Without instances, all statistics are None. ``n`` is None if the number of instances is unknown. ``std`` is the
    sample standard deviation (with n - 1), None for fewer than two instances.
    """

    n: int | None = 0
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    median: float | None = None
    max: float | None = None

    @property
    def typical(self) -> float | None:
        """Returns the median, on which one slow instance has little effect, or the mean if there is no median."""
        return self.mean if self.median is None else self.median

    def shifted(self, by: float) -> Stats:
        """Returns the statistics that the values would have if ``by`` were added to each value."""
        locations = {key: None if (value := getattr(self, key)) is None else value + by for key in _LOCATION_STATISTICS}
        return replace(self, **locations)

    @staticmethod
    def of_ns(values: Ints | Sequence[int]) -> Stats:
        """Computes the statistics of durations in ns; the statistics are in ms."""
        ms = np.asarray(values, np.float64) / NS_PER_MS
        if not len(ms):
            return Stats()
        std = float(ms.std(ddof=1)) if len(ms) > 1 else None
        return Stats(len(ms), float(ms.mean()), std, float(ms.min()), float(np.median(ms)), float(ms.max()))


def sample_ms(durations_ns: Ints) -> tuple[float, ...]:
    """Returns durations in ms: all of them, or an evenly spread sample if there are more than ``MAX_SAMPLE_VALUES``."""
    count = min(len(durations_ns), MAX_SAMPLE_VALUES)
    positions = np.linspace(0, len(durations_ns) - 1, count).round().astype(np.int64)
    return tuple((durations_ns[positions] / NS_PER_MS).tolist())


class StepTimes:
    """Adds up the time of each kind of activity in each step, to compute the mean and standard deviation over steps.

    Attributes:
        total: shape (kinds,), the sum of the times of all steps, ns.
        squares: shape (kinds,), the sum of the squared times of all steps, ns².
        typical: shape (kinds,), the sum of the times of the steps near the median, ns. Means are computed from it.
        steps, near: the number of all steps, and the number of steps near the median.
    """

    def __init__(self, kinds: int) -> None:
        self.total, self.squares, self.typical = np.zeros((3, kinds))
        self.steps = self.near = 0

    def add(self, step: Ints, kind: Ints, ns: Ints | Floats, near: Bools) -> None:
        """Adds the times of some steps, each with all of its pieces.

        Args:
            step, kind, ns: shape (pieces,), the index of the step, the kind and the duration of each piece.
            near: shape (steps,), True for each step that is near the median.
        """
        kinds = len(self.total)
        keys, key = np.unique(step * kinds + kind, return_inverse=True)
        sums_ns = np.bincount(key, ns, len(keys))
        self.total += np.bincount(keys % kinds, sums_ns, kinds)
        self.squares += np.bincount(keys % kinds, sums_ns * sums_ns, kinds)
        self.typical += np.bincount(keys % kinds, sums_ns * near[keys // kinds], kinds)
        self.steps, self.near = self.steps + len(near), self.near + int(near.sum())

    def mean_and_std_ms(self, scale: float) -> list[tuple[float, float | None]]:
        """Returns the mean over the steps near the median and the standard deviation over all steps, for each kind.

        Both are in ms and multiplied by ``scale``. The standard deviation of a single step is None.
        """
        scale /= NS_PER_MS
        means = (self.typical / self.near * scale).tolist()
        if self.steps < 2:
            return [(mean, None) for mean in means]
        std = np.sqrt(np.maximum(self.squares - self.total * self.total / self.steps, 0) / (self.steps - 1))
        return list(zip(means, (std * scale).tolist(), strict=True))
