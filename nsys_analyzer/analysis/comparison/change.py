"""Computes the change of a figure from one run to another, with the confidence interval of the change.

Two captures of one program differ for two reasons: steps vary inside a capture, and runs vary among themselves. The
steps of a capture show the first variation, but one capture of each program cannot show the second. It was measured on
programs that were run many times. An interval from the variation of the steps alone would report a change for half of
all pairs of unchanged runs (``examples/comparison``).
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

#: The standard deviation between runs of one program, as a share of the time: of the GPU's work, of the GPU's pauses
#: between two queued operations, and of the rest of the GPU's idle time, in which it waits for the program.
GPU_SPREAD, PAUSES_SPREAD, CPU_SPREAD = 0.0025, 0.04, 0.25

#: The number of bootstrap samples from which the error of a median is computed.
RESAMPLES = 1_000
#: The minimum number of values from which serial correlation is estimated, and the largest estimate.
_MIN_VALUES_FOR_CORRELATION, _MAX_CORRELATION = 8, 0.95
#: The 95 % quantile of Student's t (two-sided) for 1 to 30 degrees of freedom, then for infinitely many.
_STUDENT_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042, 1.960,
)  # fmt: skip
#: The standard error of a median divided by the standard error of a mean, for normally distributed values: √(π/2).
_MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)
#: Logarithms are limited to this value, because the exponential of a larger value exceeds the range of a float.
_LARGEST_LOGARITHM = 700.0


@dataclass(frozen=True)
class Estimate:
    """An estimate of a time, from the instances in one run or from several runs of one program.

    Attributes:
        ms: the median or the mean.
        n: the number of instances or runs; None if it is not known.
        error_ms: the standard error, assuming independent instances; None if there is only one instance.
        run_error_ms: the standard deviation from run to run; 0 if several runs already show it in ``error_ms``.
    """

    ms: float
    n: int | None
    error_ms: float | None
    run_error_ms: float = 0.0

    @staticmethod
    def of_values(values: Sequence[float], n: int | None = None) -> Estimate:
        """Returns the median of values, and its standard error. The values may be a sample of ``n`` instances."""
        return Estimate(float(np.median(values)), n or len(values), median_error(values))

    @staticmethod
    def of_mean(ms: float, std_ms: float | None, n: int) -> Estimate:
        """Returns the estimate for a mean of ``n`` instances with the given standard deviation."""
        return Estimate(ms, n, None if std_ms is None else std_ms / math.sqrt(n))

    @staticmethod
    def of_stats(stats: Stats) -> Estimate:
        """Returns the median of instances from their statistics, or the mean if the median is not known."""
        wider = 1.0 if stats.median is None else _MEDIAN_TO_MEAN_ERROR
        n, std = stats.n, stats.std
        error = None if std is None or n is None or n < 2 else wider * std / math.sqrt(n)
        return Estimate(stats.typical or 0.0, n, error)

    @staticmethod
    def of_runs(figures: Sequence[Estimate]) -> Estimate:
        """Returns the mean over runs of one program. The variation between the runs determines its error."""
        if len(figures) == 1:
            return figures[0]
        ms = [figure.ms for figure in figures]
        return Estimate.of_mean(statistics.fmean(ms), statistics.stdev(ms), len(ms))

    @staticmethod
    def zero(n: int) -> Estimate:
        """Returns the estimate of a part that occurs in none of ``n`` instances: zero, with no error."""
        return Estimate(0.0, n, 0.0)

    def with_run_error(self, run_error_ms: float) -> Estimate:
        """Returns the estimate with this standard deviation from run to run."""
        return replace(self, run_error_ms=run_error_ms)


@dataclass(frozen=True)
class SerialCorrelation:
    """The effect of serial correlation on the error of a difference between the steps of two runs.

    Consecutive steps are correlated: a GPU warms up, or a host is busy for a while. They therefore contain less
    information than the same number of independent steps. Step k of one run is also correlated with step k of the other
    if both warm up in the same way. This common variation does not add to the error of the difference.

    Attributes:
        factor: the variance of the difference ÷ the variance that independent steps would give.
        freedom: the degrees of freedom of the variance of the difference.
    """

    factor: float
    freedom: float

    @staticmethod
    def of(before: Sequence[float], after: Sequence[float]) -> SerialCorrelation | None:
        """Estimates the effect of serial correlation from the times of all steps of two runs.

        Returns None if a run has too few steps, or if all steps take equally long.
        """
        runs = [np.asarray(values, np.float64) for values in (before, after)]
        if min(map(len, runs)) < _MIN_VALUES_FOR_CORRELATION or not any(run.var() for run in runs):
            return None
        independent = sum(float(run.var()) / len(run) for run in runs)
        if len(before) == len(after):  # if steps come in pairs, the differences within the pairs form one series
            runs = [runs[1] - runs[0]]
        inflations = [(1 + correlation) / (1 - correlation) for correlation in map(_estimate_correlation, runs)]
        errors = [float(run.var()) / len(run) * inflation for run, inflation in zip(runs, inflations, strict=True)]
        freedoms = [max(len(run) / inflation - 1, 1.0) for run, inflation in zip(runs, inflations, strict=True)]
        return SerialCorrelation(sum(errors) / independent, _combine_freedoms(errors, freedoms))


def _estimate_correlation(values: Floats) -> float:
    """Estimates the correlation ρ of each value with the next one; 0 if it is negative.

    The usual estimate from n values is too low by (1 + 3·ρ) ÷ n on average (Kendall 1954). This bias is corrected.
    """
    deviation, n = values - values.mean(), len(values)
    square = float(deviation @ deviation)
    biased_correlation = float(deviation[1:] @ deviation[:-1]) / square if square else 0.0
    return min(max((biased_correlation + 1 / n) / (1 - 3 / n), 0.0), _MAX_CORRELATION)


def _combine_freedoms(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Returns the degrees of freedom of a sum of independent variances (Welch and Satterthwaite)."""
    loss = sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return sum(variances) ** 2 / loss if loss else math.inf


@dataclass(frozen=True)
class Change:
    """The change of a time from before to after, with its 95 % confidence interval.

    Attributes:
        before_ms, after_ms: the estimates.
        low_ms, high_ms: the ends of the interval of the change; None if they are not known.
        before_n, after_n: the number of instances or runs of each estimate; None if it is not known.
        inside: the share of the interval's variance that comes from steps inside a run, so that more steps reduce it.
        ms: after − before.
        share, low_share, high_share: the change and its ends as shares of the time before. :meth:`of` takes the ends
            from the logarithm of after ÷ before.
        is_change: whether 0 lies outside of the interval.
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
        """Computes the values that follow from the estimates and the interval."""
        ms, low, high, before = self.after_ms - self.before_ms, self.low_ms, self.high_ms, self.before_ms
        shares = [value / before if before and value is not None else None for value in (ms, low, high)]
        vars(self).update(zip(("ms", "share", "low_share", "high_share"), (ms, *shares), strict=True))
        vars(self)["is_change"] = low is not None and high is not None and (low > 0 or high < 0)

    @staticmethod
    def of(before: Estimate, after: Estimate, correlation: SerialCorrelation | None = None) -> Change:
        """Returns the change between two estimates. Its interval is ± Student's t × the standard error."""
        difference = after.ms - before.ms
        if before.error_ms is None or after.error_ms is None:
            return Change(before.ms, after.ms, None, None, before.n, after.n, 1.0)
        errors = [before.error_ms**2, after.error_ms**2]
        inside = sum(errors) * (correlation.factor if correlation else 1.0)
        variance = inside + before.run_error_ms**2 + after.run_error_ms**2
        share = inside / variance if variance else 0.0
        freedoms = [max((estimate.n or 1) - 1, 1) for estimate in (before, after)]
        freedom = correlation.freedom if correlation else _combine_freedoms(errors, freedoms)
        # The spread between runs counts as known exactly, so it has infinitely many degrees of freedom.
        width = student_t(freedom / share**2 if share**2 else math.inf) * math.sqrt(variance)
        change = Change(before.ms, after.ms, difference - width, difference + width, before.n, after.n, share)
        vars(change).update(
            zip(("low_share", "high_share"), _find_share_interval(before.ms, after.ms, width), strict=True)
        )
        return change


def _find_share_interval(before_ms: float, after_ms: float, width_ms: float) -> tuple[float | None, float | None]:
    """Returns the ends of the interval of the relative change. No end is below −1, because no time is below 0.

    The interval is symmetric around the logarithm of after ÷ before. Its width is the width in ms divided by the
    logarithmic mean of both times, so it excludes 0 exactly if the interval in ms does.

    Args:
        before_ms, after_ms: both times.
        width_ms: half the width of the interval in ms.
    """
    if before_ms <= 0:
        return None, None
    if after_ms <= 0:
        return max((after_ms - width_ms) / before_ms - 1, -1.0), (after_ms + width_ms) / before_ms - 1
    logarithm, difference_ms = math.log(after_ms) - math.log(before_ms), after_ms - before_ms
    half_width = width_ms * (logarithm / difference_ms if difference_ms else 1 / before_ms)
    low, high = (math.expm1(min(end, _LARGEST_LOGARITHM)) for end in (logarithm - half_width, logarithm + half_width))
    return low, high


def student_t(freedom: float) -> float:
    """Returns the 95 % quantile of Student's t (two-sided), interpolated linearly over 1 ÷ degrees of freedom."""
    reciprocals = [0.0, *(1 / n for n in range(len(_STUDENT_T_95) - 1, 0, -1))]
    return float(np.interp(1 / max(freedom, 1.0), reciprocals, _STUDENT_T_95[::-1]))


def median_error(values: Sequence[float]) -> float | None:
    """Estimates the standard error of the median by the bootstrap; None for a single value.

    The variance of resamples is (n − 1) ÷ n of the variance of samples, which the factor √(n / (n − 1)) corrects. Equal
    values always give an equal error. The error of few values is itself uncertain, so intervals use Student's t. With
    percentiles of the bootstrap instead, 11 % of unchanged pairs of 3 values would seem changed.
    """
    n = len(values)
    if n < 2:
        return None
    medians = np.median(np.asarray(values, np.float64)[_draw_resamples(n)], axis=1)
    return float(medians.std()) * math.sqrt(n / (n - 1))


@cache
def _draw_resamples(n: int) -> Ints:
    """Returns the indices of the values in each bootstrap sample, shape (resamples, n)."""
    return np.random.default_rng(n).integers(0, n, (RESAMPLES, n))
