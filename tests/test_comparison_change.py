"""Tests the interval of a change: how it is computed, and how often it misses the true change."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsys_analyzer.analysis.comparison.change import Change, Estimate, SerialCorrelation, median_error, student_t
from nsys_analyzer.analysis.statistics import Stats

TIMES = st.lists(st.floats(0.001, 1e4), min_size=2, max_size=30)


def test_the_error_of_a_median_of_two() -> None:
    """Resamples of 1 and 3: 1 and 3 a quarter of the time each, 2 half of it: a deviation of √(2 ÷ 4), × √(2 ÷ 1)."""
    assert median_error([1.0, 3.0]) == pytest.approx(math.sqrt(0.5) * math.sqrt(2), rel=0.05)
    assert median_error([1.0]) is None
    assert median_error([2.0, 2.0, 2.0]) == 0.0


@given(TIMES)
def test_the_error_is_the_same_each_time(values: list[float]) -> None:
    error = median_error(values)
    assert error == median_error(list(values))
    assert error is not None
    assert 0 <= error <= (max(values) - min(values)) * math.sqrt(2) + 1e-9 * max(values)


def test_student() -> None:
    """As tables have it; between whole numbers it falls."""
    assert student_t(1) == 12.706
    assert student_t(4) == 2.776
    assert student_t(math.inf) == 1.96
    assert student_t(0.5) == 12.706
    assert 2.776 > student_t(4.5) > 2.571
    assert 2.042 > student_t(100) > 1.96


def test_a_change_of_means() -> None:
    """10 ± 1 and 12 ± 1 of 4 each: errors 0.5, together √0.5, of 6 degrees of freedom: 2 ± 2.447 × 0.7071."""
    change = Change.of(Estimate.of_mean(10.0, 1.0, 4), Estimate.of_mean(12.0, 1.0, 4))
    assert (change.ms, change.share) == (2.0, 0.2)
    assert change.low_ms == pytest.approx(2 - 2.447 * math.sqrt(0.5))
    # The logarithm of 1.2 is 0.1823, 2 ms as a share of their logarithmic mean, 10.97 ms: so is half the interval.
    assert change.high_share == pytest.approx(1.2 * math.exp(2.447 * math.sqrt(0.5) * math.log(1.2) / 2) - 1)
    assert change.is_change
    assert change.inside == 1.0


def test_what_runs_differ_by_widens_the_interval() -> None:
    """Without any error inside, 1 ms and 1 ms between runs: ± 1.96 × √2."""
    before, after = (Estimate.of_mean(ms, 0.0, 10).with_run_error(1.0) for ms in (10.0, 12.0))
    change = Change.of(before, after)
    assert (change.low_ms, change.high_ms) == pytest.approx((2 - 1.96 * math.sqrt(2), 2 + 1.96 * math.sqrt(2)))
    assert not change.is_change
    assert change.inside == 0.0


@pytest.mark.parametrize(
    ("before", "after", "low", "high"),
    [
        # 74.5 ± 29.5 ms, and not −104 % to −45 %: the logarithm of 0.255 is −1.366, and 29.5 ÷ 74.5 of it are 0.541.
        (Estimate(100, 10, 0.0, 29.5 / 1.96), Estimate(25.5, 10, 0.0), 0.255 * math.exp(-0.541) - 1, 0.438 - 1),
        (Estimate(2.0, 10, 0.0, 0.5), Estimate(0.0, 10, 0.0), -1.0, -1 + 1.96 * 0.25),  # nothing has no logarithm
        (Estimate(2.0, 10, 0.0, 0.5), Estimate(2.0, 10, 0.0), math.exp(-0.49) - 1, math.exp(0.49) - 1),
    ],
)
def test_nothing_gets_shorter_by_more_than_itself(before: Estimate, after: Estimate, low: float, high: float) -> None:
    change = Change.of(before, after)
    assert (change.low_share, change.high_share) == pytest.approx((low, high), abs=1e-3)


@given(st.floats(0.001, 1e4), st.floats(0.001, 1e4), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_relative_interval_leaves_0_out_where_that_in_ms_does(
    a: float, b: float, first: float, second: float
) -> None:
    """And the change back has the reciprocal ends."""
    before, after = Estimate(a, 10, 0.0, first), Estimate(b, 10, 0.0, second)
    there, back = Change.of(before, after), Change.of(after, before)
    assert there.low_share is not None
    assert there.high_share is not None
    assert back.high_share is not None
    assert there.low_ms is not None
    assert there.high_ms is not None
    assert there.low_share >= -1
    if abs(there.low_ms) > 1e-6 < abs(there.high_ms):
        assert (there.low_share > 0, there.high_share < 0) == (there.low_ms > 0, there.high_ms < 0)
    if back.high_share < 1e300:
        assert 1 + there.low_share == pytest.approx(1 / (1 + back.high_share), rel=1e-6, abs=1e-9)


def test_a_single_instance_tells_no_interval() -> None:
    change = Change.of(Estimate.of_values([10.0]), Estimate.of_values([20.0]))
    assert (change.low_ms, change.high_ms, change.low_share, change.is_change) == (None, None, None, False)


def test_of_statistics_alone() -> None:
    """A median of 16 values of deviation 2: its error is √(π ÷ 2) × 2 ÷ 4; a mean's 2 ÷ 4; of unknown number none."""
    median = Estimate.of_stats(Stats(16, 10.0, 2.0, None, 9.0, None))
    assert (median.ms, median.error_ms) == (9.0, pytest.approx(math.sqrt(math.pi / 2) / 2))
    assert Estimate.of_stats(Stats(16, 10.0, 2.0)) == Estimate(10.0, 16, 0.5)
    assert Estimate.of_stats(Stats(None, 10.0, 2.0)) == Estimate(10.0, None, None), "of an unknown number"
    assert Estimate.of_stats(Stats(10, 10.0)).error_ms is None


def test_runs_tell_what_they_differ_by() -> None:
    """10, 11 and 12: a mean of 11, a deviation of 1, an error of 1 ÷ √3; what was assumed of each counts no more."""
    figure = Estimate.of_runs([Estimate(ms, 30, 0.1, 5.0) for ms in (10.0, 11.0, 12.0)])
    assert figure == Estimate(11.0, 3, pytest.approx(1 / math.sqrt(3)), 0.0)
    assert Estimate.of_runs([Estimate(10.0, 30, 0.1, 5.0)]) == Estimate(10.0, 30, 0.1, 5.0)


def test_what_both_runs_have_in_common_is_no_error() -> None:
    """Both get slower in the same way, by 1 ms a step: their differences hardly vary."""
    slower = np.arange(20.0)
    order = SerialCorrelation.of(slower, slower + np.tile([0.0, 0.1], 10))
    assert order is not None
    assert order.factor < 0.001


def test_steps_that_follow_each_other_tell_less() -> None:
    """A run whose second half is slower, against one that is the same throughout: two stretches, not 20 steps."""
    halves = np.repeat([0.0, 1.0], 10)
    order = SerialCorrelation.of(halves, np.zeros(20))
    assert order is not None
    assert order.factor > 5
    assert order.freedom < 3


def test_runs_of_different_length() -> None:
    """Each by itself: alike within, so that both together tell less than independent steps."""
    order = SerialCorrelation.of(np.repeat([0.0, 1.0], 10), np.repeat([0.0, 1.0], 8))
    assert order is not None
    assert order.factor > 5
    assert SerialCorrelation.of([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) is None, "too few to tell"
    assert SerialCorrelation.of([1.0] * 10, [2.0] * 10) is None, "nothing varies"


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "exponential"])
def test_false_alarms_of_independent_steps(n: int, kind: str) -> None:
    """Of 600 pairs of runs that differ by chance alone at most 5 % are called changed, and three standard errors."""
    random = np.random.default_rng(n)
    draw: Callable[..., np.ndarray] = getattr(random, kind)
    pairs = draw(size=(600, 2, n))
    called = sum(
        Change.of(*map(Estimate.of_values, pair), SerialCorrelation.of(*pair)).is_change for pair in pairs.tolist()
    )
    assert called <= 600 * 0.05 + 3 * math.sqrt(600 * 0.05 * 0.95)


@pytest.mark.parametrize("n", [10, 30])
def test_false_alarms_of_steps_that_are_alike(n: int) -> None:
    """An autoregressive process of correlation 0.7, as was seen of GPUs that get warm: far fewer than by each alone."""
    random = np.random.default_rng(n)
    noise = random.normal(size=(600, 2, n + 20))
    values = np.zeros_like(noise)
    for i in range(1, n + 20):
        values[..., i] = 0.7 * values[..., i - 1] + noise[..., i]
    pairs = values[..., 20:].tolist()
    figures = [[Estimate.of_values(run) for run in pair] for pair in pairs]
    alone = sum(Change.of(*two).is_change for two in figures)
    called = sum(
        Change.of(*two, SerialCorrelation.of(*pair)).is_change for two, pair in zip(figures, pairs, strict=True)
    )
    assert alone > 600 * 0.2
    assert called < alone / 2
