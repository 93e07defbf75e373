"""A figure of two runs, and the interval in which its change lies.

Two captures of one program differ: its steps vary inside a capture, and runs vary among themselves. The first is seen
in the steps. The second is not, in one capture of each, and is taken from captures of programs that were run again and
again. An interval made of the steps alone calls every other pair of runs changed (``examples/comparison``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from nsys_analyzer.analysis.summary.statistics import Stats
from nsys_analyzer.trace.arrays import Ints

#: By how much the GPU's work differs between runs of one program, a standard deviation as a share of it; its pauses
#: between two operations that are both queued; and the rest of its idle time, in which it waits for the program.
GPU_SPREAD, PAUSES_SPREAD, CPU_SPREAD = 0.0025, 0.04, 0.25

RESAMPLES = 1_000
#: Student's t that 95 % lie within, for 1 to 30 degrees of freedom and for very many.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 1.960,
)  # fmt: skip
#: The standard error of a median ÷ that of a mean, of normally distributed values: √(π/2).
_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Figure:
    """A figure of one run, or of several runs of one program, ms.

    Attributes:
        n: the instances that it is of, or the runs.
        error_ms: its standard error over them; None where a single one does not tell it.
        run_error_ms: by how much it differs from run to run, a standard deviation; 0 where the runs have told it.
    """

    ms: float
    n: int
    error_ms: float | None
    run_error_ms: float = 0.0

    @staticmethod
    def of_values(values: Sequence[float], n: int | None = None) -> Figure:
        """The median of some values, which may stand for those of ``n`` instances."""
        error, n = median_error(values), n or len(values)
        return Figure(float(np.median(values)), n, None if error is None else error * math.sqrt(len(values) / n))

    @staticmethod
    def of_mean(ms: float, std_ms: float | None, n: int) -> Figure:
        """The mean of ``n`` instances."""
        return Figure(ms, n, None if std_ms is None else std_ms / math.sqrt(n))

    @staticmethod
    def of_stats(stats: Stats) -> Figure:
        """The median of instances of which the statistics alone are known, or else the mean."""
        n, wider = stats.n or 1, 1.0 if stats.median is None else _MEDIAN_TO_MEAN
        error = None if stats.std is None or n < 2 else wider * stats.std / math.sqrt(n)
        return Figure(stats.typical or 0.0, n, error)

    @staticmethod
    def of_runs(figures: Sequence[Figure]) -> Figure:
        """The mean over runs of one program, which tell by themselves how much they differ."""
        if len(figures) == 1:
            return figures[0]
        ms = [figure.ms for figure in figures]
        return Figure.of_mean(statistics.fmean(ms), statistics.stdev(ms), len(ms))

    def between_runs(self, run_error_ms: float) -> Figure:
        """The figure, with what it differs by from run to run."""
        return replace(self, run_error_ms=run_error_ms)


@dataclass(frozen=True)
class Change:
    """A figure before and after, ms, and the interval that its change lies in at 95 %; None where nothing tells it.

    ``inside`` is the share of the interval's variance that more instances would make smaller.
    """

    before_ms: float
    after_ms: float
    low_ms: float | None
    high_ms: float | None
    before_n: int
    after_n: int
    inside: float = 0.0

    @staticmethod
    def of(before: Figure, after: Figure) -> Change:
        """The change from one run to another: Student's t × the standard error of the difference to either side."""
        difference = after.ms - before.ms
        if before.error_ms is None or after.error_ms is None:
            return Change(before.ms, after.ms, None, None, before.n, after.n, 1.0)
        inside = before.error_ms**2 + after.error_ms**2
        variance = inside + before.run_error_ms**2 + after.run_error_ms**2
        width = student_t(_freedom(before, after, variance)) * math.sqrt(variance)
        share = inside / variance if variance else 0.0
        return Change(before.ms, after.ms, difference - width, difference + width, before.n, after.n, share)

    @property
    def ms(self) -> float:
        """After − before."""
        return self.after_ms - self.before_ms

    @property
    def share(self) -> float | None:
        """The change as a share of what was before."""
        return self.ms / self.before_ms if self.before_ms else None

    @property
    def low_share(self) -> float | None:
        """The lower end of the interval as a share of what was before."""
        return self.low_ms / self.before_ms if self.before_ms and self.low_ms is not None else None

    @property
    def high_share(self) -> float | None:
        """The upper end of the interval as a share of what was before."""
        return self.high_ms / self.before_ms if self.before_ms and self.high_ms is not None else None

    @property
    def is_change(self) -> bool:
        """Whether the interval leaves no change out."""
        return self.low_ms is not None and self.high_ms is not None and (self.low_ms > 0 or self.high_ms < 0)


def _freedom(before: Figure, after: Figure, variance: float) -> float:
    """The degrees of freedom of Welch and Satterthwaite: n − 1 of each error; the spread between runs is known."""
    loss = sum((one.error_ms or 0.0) ** 4 / (one.n - 1) for one in (before, after) if one.n > 1)
    return variance**2 / loss if loss else math.inf


def student_t(freedom: float) -> float:
    """Student's t that 95 % lie within; between whole degrees of freedom, straight over their reciprocals."""
    known = [0.0, *(1 / n for n in range(len(_T) - 1, 0, -1))]
    return float(np.interp(1 / max(freedom, 1.0), known, _T[::-1]))


def median_error(values: Sequence[float]) -> float | None:
    """The standard error of the median by the bootstrap, × √(n / (n − 1)); None of a single value.

    Resamples of n values vary by n − 1 of n parts of what samples do. The same values give the same error.
    """
    n = len(values)
    if n < 2:
        return None
    medians = np.median(np.asarray(values, np.float64)[_resamples(n)], axis=1)
    return float(medians.std()) * math.sqrt(n / (n - 1))


@cache
def _resamples(n: int) -> Ints:
    return np.random.default_rng(n).integers(0, n, (RESAMPLES, n))
