"""A figure of two runs, and the interval in which its change lies.

Two captures of one program differ: its steps vary inside a capture, and runs vary among themselves. The first is seen
in the steps. The second is not, in one capture of each, and is taken from captures of programs that were run again and
again. An interval made of the steps alone calls every other pair of runs changed (``examples/comparison``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from nsys_analyzer.analysis.statistics import Stats
from nsys_analyzer.trace.arrays import Floats, Ints

#: By how much the GPU's work differs between runs of one program, a standard deviation as a share of it; its pauses
#: between two operations that are both queued; and the rest of its idle time, in which it waits for the program.
GPU_SPREAD, PAUSES_SPREAD, CPU_SPREAD = 0.0025, 0.04, 0.25

RESAMPLES = 1_000
#: Values from which on their correlation is estimated, and the most that it may be.
_FEWEST, _MOST_ALIKE = 8, 0.95
#: Student's t that 95 % lie within, for 1 to 30 degrees of freedom and for very many.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 1.960,
)  # fmt: skip
#: The standard error of a median ÷ that of a mean, of normally distributed values: √(π/2).
_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)
#: Logarithms are limited to this, because a float holds no exponential of a much larger one.
_LARGEST_LOGARITHM = 700.0


@dataclass(frozen=True)
class Estimate:
    """A figure of one run, or of several runs of one program, ms.

    Attributes:
        n: the instances that it is of, or the runs; None where timings do not say.
        error_ms: its standard error over them, if they are independent; None where a single one does not tell it.
        run_error_ms: by how much it differs from run to run, a standard deviation; 0 where the runs have told it.
    """

    ms: float
    n: int | None
    error_ms: float | None
    run_error_ms: float = 0.0

    @staticmethod
    def of_values(values: Sequence[float], n: int | None = None) -> Estimate:
        """Returns the median of some values, which may stand for ``n`` instances; their error is that of so few."""
        return Estimate(float(np.median(values)), n or len(values), median_error(values))

    @staticmethod
    def of_mean(ms: float, std_ms: float | None, n: int) -> Estimate:
        """Returns the mean of ``n`` instances."""
        return Estimate(ms, n, None if std_ms is None else std_ms / math.sqrt(n))

    @staticmethod
    def of_stats(stats: Stats) -> Estimate:
        """Returns the median of instances of which the statistics alone are known, or else the mean."""
        wider = 1.0 if stats.median is None else _MEDIAN_TO_MEAN
        n, std = stats.n, stats.std
        error = None if std is None or n is None or n < 2 else wider * std / math.sqrt(n)
        return Estimate(stats.typical or 0.0, n, error)

    @staticmethod
    def of_runs(figures: Sequence[Estimate]) -> Estimate:
        """Returns the mean over runs of one program, which tell by themselves how much they differ."""
        if len(figures) == 1:
            return figures[0]
        ms = [figure.ms for figure in figures]
        return Estimate.of_mean(statistics.fmean(ms), statistics.stdev(ms), len(ms))

    @staticmethod
    def nothing(n: int) -> Estimate:
        """Returns what none of ``n`` instances has."""
        return Estimate(0.0, n, 0.0)

    def with_run_error(self, run_error_ms: float) -> Estimate:
        """Returns the figure, with what it differs by from run to run."""
        return replace(self, run_error_ms=run_error_ms)


@dataclass(frozen=True)
class SerialCorrelation:
    """What the order of the steps says of the error of a difference.

    Steps that follow each other are alike: a GPU gets warm, a host is busy for a while. So they say less than as many
    independent ones. And step k of one run is like step k of the other, where both get warm in the same way: what they
    have in common is no error of the difference.

    Attributes:
        factor: the variance of the difference ÷ that of independent steps.
        freedom: its degrees of freedom.
    """

    factor: float
    freedom: float

    @staticmethod
    def of(before: Sequence[float], after: Sequence[float]) -> SerialCorrelation | None:
        """Returns that of the steps of two runs; None where they are too few to tell, or all alike."""
        runs = [np.asarray(values, np.float64) for values in (before, after)]
        if min(map(len, runs)) < _FEWEST or not any(run.var() for run in runs):
            return None
        independent = sum(float(run.var()) / len(run) for run in runs)
        if len(before) == len(after):  # pairs of steps, whose differences are a run of their own
            runs = [runs[1] - runs[0]]
        longer = [(1 + alike) / (1 - alike) for alike in map(_likeness, runs)]
        errors = [float(run.var()) / len(run) * times for run, times in zip(runs, longer, strict=True)]
        freedoms = [max(len(run) / times - 1, 1.0) for run, times in zip(runs, longer, strict=True)]
        return SerialCorrelation(sum(errors) / independent, _joined_freedom(errors, freedoms))


def _likeness(values: Floats) -> float:
    """Returns the correlation ρ of each value with the next one, from 0 on.

    What few values show of it is too low, by (1 + 3·ρ) ÷ n (Kendall 1954), which is added.
    """
    apart, n = values - values.mean(), len(values)
    square = float(apart @ apart)
    seen = float(apart[1:] @ apart[:-1]) / square if square else 0.0
    return min(max((seen + 1 / n) / (1 - 3 / n), 0.0), _MOST_ALIKE)


def _joined_freedom(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Returns the degrees of freedom of the sum of independent variances, as of Welch and Satterthwaite."""
    loss = sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return sum(variances) ** 2 / loss if loss else math.inf


@dataclass(frozen=True)
class Change:
    """A figure before and after, ms, and the interval that its change lies in at 95 %; None where nothing tells it.

    ``before_n`` and ``after_n`` are the instances or runs of each, None where they are not known. ``inside`` is the
    share of the interval's variance that more instances would make smaller. ``ms`` is after − before; it and both ends
    of the interval are given as shares of what was before, too (:meth:`of` takes the ends of the logarithm of the
    ratio); ``is_change`` says that the interval leaves 0 out.
    """

    before_ms: float
    after_ms: float
    low_ms: float | None
    high_ms: float | None
    before_n: int | None
    after_n: int | None
    inside: float = 0.0
    ms: float = field(init=False)
    share: float | None = field(init=False)
    low_share: float | None = field(init=False)
    high_share: float | None = field(init=False)
    is_change: bool = field(init=False)

    def __post_init__(self) -> None:
        """Fills what follows from the figures and the interval."""
        ms, low, high, before = self.after_ms - self.before_ms, self.low_ms, self.high_ms, self.before_ms
        shares = [value / before if before and value is not None else None for value in (ms, low, high)]
        vars(self).update(zip(("ms", "share", "low_share", "high_share"), (ms, *shares), strict=True))
        vars(self)["is_change"] = low is not None and high is not None and (low > 0 or high < 0)

    @staticmethod
    def of(before: Estimate, after: Estimate, order: SerialCorrelation | None = None) -> Change:
        """Returns the change from one run to another: Student's t × the difference's standard error to either side."""
        difference = after.ms - before.ms
        if before.error_ms is None or after.error_ms is None:
            return Change(before.ms, after.ms, None, None, before.n, after.n, 1.0)
        errors = [before.error_ms**2, after.error_ms**2]
        inside = sum(errors) * (order.factor if order else 1.0)
        variance = inside + before.run_error_ms**2 + after.run_error_ms**2
        share = inside / variance if variance else 0.0
        freedom = order.freedom if order else _joined_freedom(errors, [max((f.n or 1) - 1, 1) for f in (before, after)])
        # Of Welch and Satterthwaite, too: the spread between runs is taken as known.
        width = student_t(freedom / share**2 if share**2 else math.inf) * math.sqrt(variance)
        change = Change(before.ms, after.ms, difference - width, difference + width, before.n, after.n, share)
        vars(change).update(zip(("low_share", "high_share"), _share_ends(before.ms, after.ms, width), strict=True))
        return change


def _share_ends(before_ms: float, after_ms: float, width_ms: float) -> tuple[float | None, float | None]:
    """Returns the ends of a relative change, taken from the logarithm of after ÷ before: no time gets below 0.

    Half the interval in ms is divided by the logarithmic mean of both figures, as the difference is. So this interval
    leaves 0 out exactly if the one in ms does.
    """
    if before_ms <= 0:
        return None, None
    if after_ms <= 0:
        return max((after_ms - width_ms) / before_ms - 1, -1.0), (after_ms + width_ms) / before_ms - 1
    logarithm, difference_ms = math.log(after_ms) - math.log(before_ms), after_ms - before_ms
    half = width_ms * (logarithm / difference_ms if difference_ms else 1 / before_ms)
    low, high = (math.expm1(min(end, _LARGEST_LOGARITHM)) for end in (logarithm - half, logarithm + half))
    return low, high


def student_t(freedom: float) -> float:
    """Returns Student's t that 95 % lie within; between whole degrees of freedom, straight over their reciprocals."""
    known = [0.0, *(1 / n for n in range(len(_T) - 1, 0, -1))]
    return float(np.interp(1 / max(freedom, 1.0), known, _T[::-1]))


def median_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of the median by the bootstrap, × √(n / (n − 1)); None of a single value.

    Resamples of n values vary by n − 1 of n parts of what samples do. The same values give the same error. Few values
    make it uncertain, which Student's t allows for: by the plain percentiles of the bootstrap, 11% of pairs of 3 values
    would seem changed where nothing is.
    """
    n = len(values)
    if n < 2:
        return None
    medians = np.median(np.asarray(values, np.float64)[_resamples(n)], axis=1)
    return float(medians.std()) * math.sqrt(n / (n - 1))


@cache
def _resamples(n: int) -> Ints:
    return np.random.default_rng(n).integers(0, n, (RESAMPLES, n))
