"""Two programs that ran in turns: whether the second is faster, how well that is known, and whether they do the same.

A pair of processes, one of each program, is what counts: the steps inside of a process are alike in what its start
decided, and so tell nothing of another start. The pairs are looked at after each of them, until they tell enough. An
interval of Student's t leaves out 0 sooner or later where one looks again and again. The intervals here do not, in
95 % of programs that were not changed, however often one looks. One takes the deviation from the pairs (a mixture
sequential test of the t statistic: Lai 1976; Wang and Ramdas 2025); it is about 1.8 times as wide, leaves out 0 in 4 %,
and needs four pairs. The other one takes the largest deviation that pairs of one program have, and leaves out 0 in 1 %:
by it, a single pair tells that one program takes less than half of the other's time. It is not used where pairs differ
by more than that, or the blocks of one so much that they do not tell it to half of that. Together both hold in 95 %, so
either may be taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.trace.arrays import Floats

#: Below half an interval of this share of the step nobody asks; of a change, this part of it tells how large it is; and
#: of one that is larger than this beyond doubt nobody waits for digits.
NARROW, PART, LARGE = 0.01, 0.25, 0.1
#: The share of unchanged programs that may be called changed by each of the two intervals.
_LEVEL, _LEVEL_OF_FEW = 0.04, 0.01
#: The logarithms of pairs of one program differ by less, a standard deviation; and the variance looked for ÷ its own.
_MOST_APART, _SOUGHT_OF_FEW = 0.2, 10.0
#: Of changes of the size that is looked for: their variance ÷ that of a pair. Any value keeps the level; this one makes
#: the interval narrow at 5 to 20 pairs.
_SOUGHT = 5.0
#: Losses that differ by more than this share of the largest one, and by more than so many deviations of a process's,
#: are those of another computation; rows of a batch that differ by more than this share are another batch.
_LOSSES, _MANY_DEVIATIONS, _ROWS = 0.05, 4.0, 0.01
#: Of few pairs, whose deviation is uncertain: Student's t of 1 in 1,000, of 2 and 4 degrees of freedom, ÷ √pairs.
_DEVIATIONS = {2: 22.3, 3: 5.0}
#: So many pairs tell losses that differ by chance, of a program without a seed, from those of another computation.
_JUDGING_PAIRS = 3
_MOST_PAIRS = 1_000


@dataclass(frozen=True)
class Process:
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
        whole = np.array(self.steps_ms[: len(self.steps_ms) // size * size]).reshape(-1, size)
        means: Floats = whole[:, 1 if size > 1 else 0 :].mean(axis=1)
        return means

    @property
    def step_ms(self) -> float:
        """Returns the median of the blocks, which leaves out a stall that comes once."""
        return float(np.median(self.blocks_ms))


@dataclass(frozen=True)
class Turns:
    """Pairs of processes of two programs, in the order in which they ran."""

    pairs: tuple[tuple[Process, Process], ...]

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
        """Returns whether a change is known to a part of it, or to be large; or none that matters may be left."""
        middle, half = abs(float(self._logarithms.mean())), self._half_width(len(self.pairs))
        return half <= max(NARROW, PART * middle if middle > half else 0, middle - LARGE)

    @property
    def more_pairs(self) -> int | None:
        """Returns how many more would tell a change as large as the one that is seen, or that there is none.

        Of one pair nobody knows how others differ: it is the fewest that tell anything.
        """
        n, sought = len(self.pairs), max(NARROW, abs(float(self._logarithms.mean())))
        if n == 1:
            return next(more for more in range(_MOST_PAIRS) if math.isfinite(_t_for_ever(n + more)))
        return next((more for more in range(_MOST_PAIRS) if self._half_width(n + more) < sought), None)

    def _half_width(self, pairs: int) -> float:
        """Returns half the interval after so many pairs that differ as those do that are there.

        It is the narrower one of two: by how much the pairs differ, and by how much any pairs do, where that tells a
        change.
        """
        if self.unclear_loss and pairs < _JUDGING_PAIRS:
            return math.inf
        t, n, error = _t_for_ever(pairs), len(self.pairs), 1 / math.sqrt(pairs)
        deviation = float(self._logarithms.std(ddof=1)) if n > 1 else 0.0
        by_pairs = t * deviation * error if n > 1 and math.isfinite(t) else math.inf
        inside = max(float(blocks.std()) / math.sqrt(len(blocks)) for blocks in self._blocks)
        is_usual = max(deviation, 2 * inside) <= _MOST_APART
        by_most = _z_for_ever(pairs) * _MOST_APART * error
        return min(by_pairs, by_most if is_usual and by_most < abs(self._logarithms.mean()) else math.inf)

    def other_work(self) -> Iterator[str]:
        """Yields why the programs do not compute the same, a sentence each."""
        sides = list(zip(*self.pairs, strict=True))
        rows = [float(np.median([row for one in side for row in one.rows] or [0])) for side in sides]
        if all(rows) and abs(rows[1] - rows[0]) > _ROWS * rows[0]:
            yield f"A step computes {rows[0]:,.0f} rows before, and {rows[1]:,.0f} after: another batch"
        if self._other_loss:
            yield self._other_loss

    @property
    def unclear_loss(self) -> str:
        """Returns how a loss differs where so few pairs do not tell whether by chance; empty where none does."""
        n = len(self.pairs)
        return self._differing_loss(0.0) if n < _JUDGING_PAIRS and not self._other_loss else ""

    @cached_property
    def _other_loss(self) -> str:
        """Returns how a loss differs by more than those of one program do among each other; empty where none does."""
        return self._differing_loss(_DEVIATIONS.get(len(self.pairs), _MANY_DEVIATIONS)) if len(self.pairs) > 1 else ""

    def _differing_loss(self, deviations: float) -> str:
        """Returns how the first loss differs that does so by a share, and by so many deviations; empty where none does.

        One that is no number in every process of one side, and in none of the other, differs as well.
        """
        steps = min(len(one.losses) for pair in self.pairs for one in pair)
        tables = [np.array([one.losses[:steps] for one in side]) for side in zip(*self.pairs, strict=True)]
        sides = [np.ma.masked_invalid(table) for table in tables]
        middle = [side.mean(axis=0).filled(math.nan) for side in sides]
        ended = [np.isnan(of_side) for of_side in middle]
        whole = [~np.ma.getmaskarray(side).any(axis=0) for side in sides]
        variances = [side.var(axis=0, ddof=1).filled(0.0) if len(side) > 1 else np.zeros(steps) for side in sides]
        largest = np.abs(middle[0], where=~ended[0], out=np.zeros(steps)).max(initial=0.0)
        allowed = np.maximum(_LOSSES * largest, deviations * np.sqrt(sum(variances)))
        apart = np.abs(middle[1] - middle[0]) > allowed
        apart |= (ended[0] & whole[1]) | (ended[1] & whole[0])
        if not apart.any():
            return ""
        step = int(np.argmax(apart))
        before, after = (float(np.median(table[:, step])) for table in tables)
        return f"Loss {step + 1} is {before:.4g} before, and {after:.4g} after"

    @property
    def is_seen(self) -> bool:
        """Returns whether losses of both are known."""
        return all(one.losses for pair in self.pairs for one in pair)


def _t_for_ever(pairs: int) -> float:
    """Returns how far Student's t gets from 0 at this number of pairs in 1 of 25 series that it ever gets so far in.

    The Bayes factor of a normally distributed size of the change ÷ its deviation, against none, exceeds 25 at any time
    in no more than 1 of 25 unchanged series (Ville's inequality); where it is 25, t is what is returned.
    """
    wide = 1 + pairs * _SOUGHT
    ratio = (math.sqrt(wide) / _LEVEL) ** (2 / pairs)
    return math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / wide)) if ratio < wide else math.inf


def _z_for_ever(pairs: int) -> float:
    """Returns the same of the mean ÷ its error where the deviation is known (Robbins 1970)."""
    wide = 1 + pairs * _SOUGHT_OF_FEW
    return math.sqrt(wide / (wide - 1) * (2 * math.log(1 / _LEVEL_OF_FEW) + math.log(wide)))
