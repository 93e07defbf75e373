"""Compares two programs that ran in turns: whether the second is faster, with which certainty, and by the same work.

The sample is a pair of processes, one of each program. The steps of one process depend on its start, so they do not
show how another start differs. The pairs are evaluated after each new pair, until the result is certain enough. An
interval of Student's t would exclude 0 sooner or later if it were computed again and again. The two intervals here
include 0 at all times for 95 % of unchanged programs, however often they are computed.

The first interval estimates the deviation from the pairs (a mixture sequential test of the t statistic: Lai 1976; Wang
and Ramdas 2025). It is about 1.8 times as wide as Student's interval, excludes 0 for at most 4 % of unchanged programs,
and needs four pairs.

The second interval assumes the largest deviation that pairs of one program have, and excludes 0 for at most 1 %. With
it, a single pair is enough to show that one program takes less than half of the other's time. It is not used if the
pairs deviate by more than it assumes, or if the error of a pair, estimated from its blocks, exceeds half of that
deviation.

Together, both intervals include 0 for 95 % of unchanged programs, so the narrower interval can be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.trace.arrays import Floats

#: The measurement ends if half the interval is below the first share of the step or below the second share of the
#: change, or if the change certainly exceeds the third share of the step.
NARROW_INTERVAL_SHARE, PRECISE_CHANGE_SHARE, LARGE_SHARE = 0.01, 0.25, 0.1
#: The share of unchanged programs for which each of the two intervals may exclude 0.
_T_LEVEL, _Z_LEVEL = 0.04, 0.01
#: The largest standard deviation that the second interval assumes for the logarithm of after ÷ before of a pair.
_LARGEST_PAIR_DEVIATION = 0.2
#: The variance of the expected changes ÷ the variance of a pair, for each of the two intervals. The level holds for any
#: value; the first value makes the interval narrow at 5 to 20 pairs.
_T_CHANGE_VARIANCE, _Z_CHANGE_VARIANCE = 5.0, 10.0
#: Two programs do different work if a loss differs by more than the first value as a share of the largest loss, and by
#: more than the second value in standard deviations between processes.
_LOSS_TOLERANCE, _LOSS_DEVIATIONS = 0.05, 4.0
#: Two programs have different batch sizes if the numbers of rows differ by more than this share.
_BATCH_ROWS_TOLERANCE = 0.01
#: The limit that replaces ``_LOSS_DEVIATIONS`` for two or three pairs, whose standard deviation is uncertain: the
#: two-sided 0.1 % quantile of Student's t with 2 or 4 degrees of freedom, ÷ the square root of the number of pairs.
_LOSS_DEVIATIONS_OF_FEW_PAIRS = {2: 22.3, 3: 5.0}
#: The minimum number of pairs that shows whether losses differ because programs set no seed, or because they do
#: different work.
_FEWEST_LOSS_PAIRS = 3
#: ``ProcessPairs.more_pairs`` is None if more pairs than this would be needed.
_MAX_ADDITIONAL_PAIRS = 1_000


@dataclass(frozen=True)
class WorkDifference:
    """A sign that two programs compute different results. ``verify.section`` writes its sentence.

    Attributes:
        kind: whether the rows of a batch or the losses differ.
        before, after: the rows, or the losses.
        step: the number of the step with the loss, from 1; 0 for rows.
    """

    kind: Literal["rows", "loss"]
    before: float
    after: float
    step: int = 0


@dataclass(frozen=True)
class TimedProcess:
    """The measurements of one process of a program.

    Attributes:
        steps_ms: the lengths of the measured steps.
        block: the number of steps in each turn of the process. The other process of the pair then has its turn.
        losses: the losses of the first backward passes.
        rows: the rows of the batch of each of the first steps.
    """

    steps_ms: tuple[float, ...]
    block: int = 1
    losses: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()

    @cached_property
    def blocks_ms(self) -> Floats:
        """Returns the mean step of each block, ms. The first step does not count, because it follows a pause."""
        size = min(self.block, len(self.steps_ms))
        blocks = np.array(self.steps_ms[: len(self.steps_ms) // size * size]).reshape(-1, size)
        means: Floats = blocks[:, 1 if size > 1 else 0 :].mean(axis=1)
        return means

    @property
    def step_ms(self) -> float:
        """Returns the median of the mean steps of all blocks, ms. A single stall hardly changes a median."""
        return float(np.median(self.blocks_ms))


@dataclass(frozen=True)
class ProcessPairs:
    """The pairs of processes of two programs, in the order in which they ran."""

    pairs: tuple[tuple[TimedProcess, TimedProcess], ...]

    @cached_property
    def _blocks(self) -> list[Floats]:
        """Returns, for each pair, the logarithm of after ÷ before for each two blocks that ran one after the other."""
        pairs = [(before.blocks_ms, after.blocks_ms) for before, after in self.pairs]
        fewest_steps = [min(map(len, pair)) for pair in pairs]
        return [np.log(after[:n] / before[:n]) for (before, after), n in zip(pairs, fewest_steps, strict=True)]

    @cached_property
    def _logarithms(self) -> Floats:
        """Returns the logarithm of after ÷ before of each pair: the median of its blocks."""
        return np.array([np.median(blocks) for blocks in self._blocks])

    @property
    def change(self) -> Change:
        """Returns the change of a step. Its interval is valid whenever the measurement stops."""
        n, before_ms = len(self.pairs), float(np.median([before.step_ms for before, _ in self.pairs]))
        mean_logarithm, half_width = float(self._logarithms.mean()), self._half_width(n)
        low, high = (
            before_ms * math.expm1(end) if math.isfinite(half_width) else None
            for end in (mean_logarithm - half_width, mean_logarithm + half_width)
        )
        return Change(before_ms, before_ms * math.exp(mean_logarithm), low, high, n, n)

    @property
    def is_certain_enough(self) -> bool:
        """Returns whether the change is known precisely, is certainly large, or is too small to matter."""
        mean_logarithm, half_width = abs(float(self._logarithms.mean())), self._half_width(len(self.pairs))
        return half_width <= max(
            NARROW_INTERVAL_SHARE,
            PRECISE_CHANGE_SHARE * mean_logarithm if mean_logarithm > half_width else 0,
            mean_logarithm - LARGE_SHARE,
        )

    @property
    def more_pairs(self) -> int | None:
        """Returns how many more pairs would confirm the observed change, or that there is no change.

        Returns None if this takes more than ``_MAX_ADDITIONAL_PAIRS``. After one pair, the deviation of pairs is
        unknown, so the result is the number of pairs that are missing for an interval.
        """
        n, change = len(self.pairs), max(NARROW_INTERVAL_SHARE, abs(float(self._logarithms.mean())))
        if n == 1:
            return next(count for count in range(_MAX_ADDITIONAL_PAIRS) if math.isfinite(_find_t_limit(n + count)))
        return next((count for count in range(_MAX_ADDITIONAL_PAIRS) if self._half_width(n + count) < change), None)

    def _half_width(self, pairs: int) -> float:
        """Returns half the width of the interval after ``pairs`` pairs, if the deviation of the pairs does not change.

        The narrower of the two intervals is used. The second interval is used only if it excludes 0.
        """
        if self.unclear_loss_difference and pairs < _FEWEST_LOSS_PAIRS:
            return math.inf
        t, n, error = _find_t_limit(pairs), len(self.pairs), 1 / math.sqrt(pairs)
        deviation = float(self._logarithms.std(ddof=1)) if n > 1 else 0.0
        width_by_pairs = t * deviation * error if n > 1 and math.isfinite(t) else math.inf
        error_of_pair = max(float(blocks.std()) / math.sqrt(len(blocks)) for blocks in self._blocks)
        is_usual = max(deviation, 2 * error_of_pair) <= _LARGEST_PAIR_DEVIATION
        width_by_largest_deviation = _find_z_limit(pairs) * _LARGEST_PAIR_DEVIATION * error
        return min(
            width_by_pairs,
            width_by_largest_deviation
            if is_usual and width_by_largest_deviation < abs(self._logarithms.mean())
            else math.inf,
        )

    @cached_property
    def work_differences(self) -> tuple[WorkDifference, ...]:
        """Returns the differences which show that the programs compute different results; empty if there are none."""
        sides = list(zip(*self.pairs, strict=True))
        before, after = (float(np.median([row for run in side for row in run.rows] or [0])) for side in sides)
        other_batch = before and after and abs(after - before) > _BATCH_ROWS_TOLERANCE * before
        rows = (WorkDifference("rows", before, after),) if other_batch else ()
        n = len(self.pairs)
        loss = self._find_loss_difference(_LOSS_DEVIATIONS_OF_FEW_PAIRS.get(n, _LOSS_DEVIATIONS)) if n > 1 else None
        return (*rows, loss) if loss else rows

    @property
    def unclear_loss_difference(self) -> WorkDifference | None:
        """Returns a difference of losses that may be due to chance, because there are too few pairs; None otherwise."""
        is_clear = any(difference.kind == "loss" for difference in self.work_differences)
        return self._find_loss_difference(0.0) if len(self.pairs) < _FEWEST_LOSS_PAIRS and not is_clear else None

    def _find_loss_difference(self, deviations: float) -> WorkDifference | None:
        """Returns the first loss that differs by more than ``_LOSS_TOLERANCE`` and ``deviations`` standard deviations.

        A loss also differs if it is NaN in every process of one side and in no process of the other. Returns None if no
        loss differs.
        """
        steps = min(len(process.losses) for pair in self.pairs for process in pair)
        if not steps:
            return None
        tables = [np.array([process.losses[:steps] for process in side]) for side in zip(*self.pairs, strict=True)]
        sides = [np.ma.masked_invalid(table) for table in tables]
        mean_losses = [side.mean(axis=0).filled(math.nan) for side in sides]
        never_finite = [np.isnan(losses) for losses in mean_losses]
        all_finite = [np.isfinite(table).all(axis=0) for table in tables]
        # The variance is 0 if only one process has the loss.
        variances = [side.var(axis=0, ddof=1).filled(0.0) for side in sides]
        largest_loss = np.abs(mean_losses[0][~never_finite[0]]).max(initial=0.0)
        allowed_difference = np.maximum(_LOSS_TOLERANCE * largest_loss, deviations * np.sqrt(sum(variances)))
        differs = np.abs(mean_losses[1] - mean_losses[0]) > allowed_difference
        differs |= (never_finite[0] & all_finite[1]) | (never_finite[1] & all_finite[0])
        if not differs.any():
            return None
        step = int(np.argmax(differs))
        before, after = (float(np.median(table[:, step])) for table in tables)
        return WorkDifference("loss", before, after, step + 1)

    @property
    def has_losses(self) -> bool:
        """Returns whether the losses of every process are known."""
        return all(process.losses for pair in self.pairs for process in pair)


def _find_t_limit(pairs: int) -> float:
    """Returns the limit of Student's t that only 1 of 25 series of unchanged pairs ever exceeds.

    The Bayes factor compares two hypotheses: that the change divided by its deviation is normally distributed, and that
    there is no change. In at most 1 of 25 unchanged series, it ever exceeds 25 (Ville's inequality). The limit is the
    value of t at which the factor is 25.
    """
    variance_factor = 1 + pairs * _T_CHANGE_VARIANCE
    ratio = (math.sqrt(variance_factor) / _T_LEVEL) ** (2 / pairs)
    return math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / variance_factor)) if ratio < variance_factor else math.inf


def _find_z_limit(pairs: int) -> float:
    """Returns the limit of mean ÷ error that only 1 of 100 unchanged series with a known deviation ever exceeds.

    See Robbins (1970).
    """
    wide = 1 + pairs * _Z_CHANGE_VARIANCE
    return math.sqrt(wide / (wide - 1) * (2 * math.log(1 / _Z_LEVEL) + math.log(wide)))
