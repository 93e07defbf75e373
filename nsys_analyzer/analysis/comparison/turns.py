"""Two programs that ran in turns: whether the second is faster, how well that is known, and whether they do the same.

A pair of processes, one of each program, is what counts: the steps inside of a process are alike in what its start
decided, and so tell nothing of another start. The pairs are evaluated after each new pair, until they tell enough. An
interval of Student's t leaves out 0 sooner or later if it is computed again and again. The two intervals here do not,
for 95 % of programs that were not changed, however often they are computed.

The first interval takes the deviation from the pairs (a mixture sequential test of the t statistic: Lai 1976; Wang and
Ramdas 2025). It is about 1.8 times as wide as Student's, leaves out 0 for 4 % of unchanged programs, and needs four
pairs. The second interval assumes the largest deviation that pairs of one program have, and leaves out 0 for 1 %. With
it, a single pair tells that one program takes less than half of the other's time. It is not used if the pairs deviate
by more than it assumes, or if the error of a pair, by its blocks, is more than half of that. Together both hold for
95 %, so the narrower one may be taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.trace.arrays import Floats

#: Half an interval is narrow enough below this share of the step, or below this part of the change itself, or if the
#: change is certainly larger than this share of the step.
NARROW, PART, LARGE = 0.01, 0.25, 0.1
#: The share of unchanged programs that may be called changed by each of the two intervals.
_LEVEL, _LEVEL_OF_FEW = 0.04, 0.01
#: The largest standard deviation that the logarithms of pairs of one program have.
_LARGEST_DEVIATION = 0.2
#: The variance of the changes that are looked for ÷ that of a pair, for each of the two intervals. Any value keeps the
#: level; the first one makes the interval narrow at 5 to 20 pairs.
_CHANGES_TO_PAIR, _CHANGES_TO_PAIR_OF_FEW = 5.0, 10.0
#: Losses are those of another computation if they differ by more than this share of the largest one, and by more than
#: this many deviations of a process's loss. Rows of a batch are another batch if they differ by more than this share.
_LOSSES, _LOSS_DEVIATIONS, _ROWS = 0.05, 4.0, 0.01
#: The deviation of two or three pairs is uncertain: Student's t of 1 in 1,000, 2 and 4 degrees of freedom, ÷ √pairs.
_LOSS_DEVIATIONS_OF_FEW = {2: 22.3, 3: 5.0}
#: This many pairs show whether losses differ by chance, because a program sets no seed, or by another computation.
_JUDGING_PAIRS = 3
_MOST_PAIRS = 1_000


@dataclass(frozen=True)
class TimedProcess:
    """What a process of a program was measured to do.

    Attributes:
        steps_ms: its measured steps; ``block`` of them followed each other, then the other program had its turn.
        losses: those of the first backward passes.
        rows: of each of the first steps, the rows of its batch.
    """

    steps_ms: tuple[float, ...]
    block: int = 1
    losses: tuple[float, ...] = ()
    rows: tuple[int, ...] = ()

    @cached_property
    def blocks_ms(self) -> Floats:
        """Returns the mean step of each block, without its first step, which follows a pause."""
        size = min(self.block, len(self.steps_ms))
        blocks = np.array(self.steps_ms[: len(self.steps_ms) // size * size]).reshape(-1, size)
        means: Floats = blocks[:, 1 if size > 1 else 0 :].mean(axis=1)
        return means

    @property
    def step_ms(self) -> float:
        """Returns the median of the blocks, which leaves out a stall that comes once."""
        return float(np.median(self.blocks_ms))


@dataclass(frozen=True)
class ProcessPairs:
    """Pairs of processes of two programs, in the order in which they ran."""

    pairs: tuple[tuple[TimedProcess, TimedProcess], ...]

    @cached_property
    def _blocks(self) -> list[Floats]:
        """Returns the logarithms of after ÷ before of each pair's blocks, which ran beside each other."""
        pairs = [(before.blocks_ms, after.blocks_ms) for before, after in self.pairs]
        fewest = [min(map(len, pair)) for pair in pairs]
        return [np.log(after[:n] / before[:n]) for (before, after), n in zip(pairs, fewest, strict=True)]

    @cached_property
    def _logarithms(self) -> Floats:
        """Returns that of each pair: the median of its blocks."""
        return np.array([np.median(blocks) for blocks in self._blocks])

    @property
    def change(self) -> Change:
        """Returns the change of a step with its interval, which is valid whenever one stops."""
        n, before_ms = len(self.pairs), float(np.median([before.step_ms for before, _ in self.pairs]))
        middle, half = float(self._logarithms.mean()), self._half_width(n)
        low, high = (
            before_ms * math.expm1(end) if math.isfinite(half) else None for end in (middle - half, middle + half)
        )
        return Change(before_ms, before_ms * math.exp(middle), low, high, n, n)

    @property
    def is_enough(self) -> bool:
        """Returns whether the change is known well enough, or certainly large, or too small to matter."""
        middle, half = abs(float(self._logarithms.mean())), self._half_width(len(self.pairs))
        return half <= max(NARROW, PART * middle if middle > half else 0, middle - LARGE)

    @property
    def more_pairs(self) -> int | None:
        """Returns how many more would tell a change as large as the one that is seen, or that there is none.

        Of one pair nobody knows how others differ: it is the fewest that tell anything.
        """
        n, change = len(self.pairs), max(NARROW, abs(float(self._logarithms.mean())))
        if n == 1:
            return next(count for count in range(_MOST_PAIRS) if math.isfinite(_t_for_ever(n + count)))
        return next((count for count in range(_MOST_PAIRS) if self._half_width(n + count) < change), None)

    def _half_width(self, pairs: int) -> float:
        """Returns half the interval after this many pairs, if all of them differ as the present ones do.

        It is the narrower one of the two intervals; the second one counts only if it shows a change.
        """
        if self.unclear_loss and pairs < _JUDGING_PAIRS:
            return math.inf
        t, n, error = _t_for_ever(pairs), len(self.pairs), 1 / math.sqrt(pairs)
        deviation = float(self._logarithms.std(ddof=1)) if n > 1 else 0.0
        by_pairs = t * deviation * error if n > 1 and math.isfinite(t) else math.inf
        error_of_pair = max(float(blocks.std()) / math.sqrt(len(blocks)) for blocks in self._blocks)
        is_usual = max(deviation, 2 * error_of_pair) <= _LARGEST_DEVIATION
        by_largest = _z_for_ever(pairs) * _LARGEST_DEVIATION * error
        return min(by_pairs, by_largest if is_usual and by_largest < abs(self._logarithms.mean()) else math.inf)

    def other_work(self) -> Iterator[str]:
        """Yields why the programs do not compute the same, a sentence each."""
        sides = list(zip(*self.pairs, strict=True))
        rows = [float(np.median([row for process in side for row in process.rows] or [0])) for side in sides]
        if all(rows) and abs(rows[1] - rows[0]) > _ROWS * rows[0]:
            yield f"A step computes {rows[0]:,.0f} rows before, and {rows[1]:,.0f} after: another batch"
        if self._other_loss:
            yield self._other_loss

    @property
    def unclear_loss(self) -> str:
        """Returns how a loss differs while there are too few pairs to exclude chance; empty if none differs."""
        n = len(self.pairs)
        return self._differing_loss(0.0) if n < _JUDGING_PAIRS and not self._other_loss else ""

    @cached_property
    def _other_loss(self) -> str:
        """Returns how a loss differs by more than it does between processes of one program; empty if none does."""
        n = len(self.pairs)
        return self._differing_loss(_LOSS_DEVIATIONS_OF_FEW.get(n, _LOSS_DEVIATIONS)) if n > 1 else ""

    def _differing_loss(self, deviations: float) -> str:
        """Returns the first loss that differs by the share and by this many deviations; empty if none does.

        A loss that is NaN in every process of one side, and in no process of the other, differs as well.
        """
        steps = min(len(process.losses) for pair in self.pairs for process in pair)
        tables = [np.array([process.losses[:steps] for process in side]) for side in zip(*self.pairs, strict=True)]
        sides = [np.ma.masked_invalid(table) for table in tables]
        middle = [side.mean(axis=0).filled(math.nan) for side in sides]
        never_finite = [np.isnan(of_side) for of_side in middle]
        all_finite = [np.isfinite(table).all(axis=0) for table in tables]
        variances = [side.var(axis=0, ddof=1).filled(0.0) for side in sides]  # 0 for a loss of one process
        largest = np.abs(middle[0][~never_finite[0]]).max(initial=0.0)
        allowed = np.maximum(_LOSSES * largest, deviations * np.sqrt(sum(variances)))
        apart = np.abs(middle[1] - middle[0]) > allowed
        apart |= (never_finite[0] & all_finite[1]) | (never_finite[1] & all_finite[0])
        if not apart.any():
            return ""
        step = int(np.argmax(apart))
        before, after = (float(np.median(table[:, step])) for table in tables)
        return f"Loss {step + 1} is {before:.4g} before, and {after:.4g} after"

    @property
    def has_losses(self) -> bool:
        """Returns whether losses of both are known."""
        return all(process.losses for pair in self.pairs for process in pair)


def _t_for_ever(pairs: int) -> float:
    """Returns how far Student's t gets from 0 at this number of pairs in 1 of 25 series that it ever gets so far in.

    The Bayes factor of a normally distributed size of the change ÷ its deviation, against none, exceeds 25 at any time
    in no more than 1 of 25 unchanged series (Ville's inequality); where it is 25, t is what is returned.
    """
    wide = 1 + pairs * _CHANGES_TO_PAIR
    ratio = (math.sqrt(wide) / _LEVEL) ** (2 / pairs)
    return math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / wide)) if ratio < wide else math.inf


def _z_for_ever(pairs: int) -> float:
    """Returns the same for the mean ÷ its error if the deviation is known, and 1 of 100 series (Robbins 1970)."""
    wide = 1 + pairs * _CHANGES_TO_PAIR_OF_FEW
    return math.sqrt(wide / (wide - 1) * (2 * math.log(1 / _LEVEL_OF_FEW) + math.log(wide)))
