"""Two programs that ran in turns: whether the second is faster, how well that is known, and whether they do the same.

A pair of processes, one of each program, is what counts: the steps inside of a process are alike in what its start
decided, and so tell nothing of another start. The pairs are looked at after each of them, until they tell enough. An
interval of Student's t leaves out 0 sooner or later where one looks again and again. The interval here does not, in
95 % of programs that were not changed, however often one looks (a mixture sequential test of the t statistic: Lai
1976; Wang and Ramdas 2025). It is about 1.7 times as wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nsys_analyzer.analysis.comparison.change import Change
from nsys_analyzer.trace.arrays import Floats

#: Below half an interval of this share of the step nobody asks; and of a change, this part of it tells how large it is.
NARROW, PART = 0.01, 0.25
#: The share of unchanged programs that may be called changed.
_LEVEL = 0.05
#: Of changes of the size that is looked for: their variance ÷ that of a pair. Any value keeps the level; this one makes
#: the interval narrow at 5 to 20 pairs.
_SOUGHT = 5.0
#: Losses that differ by more than this share of the largest one, and by more than so many deviations of a process's,
#: are those of another computation; rows of a batch that differ by more than this share are another batch.
_LOSSES, _DEVIATIONS, _ROWS = 0.05, 4.0, 0.01
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
    def _logarithms(self) -> Floats:
        """Returns that of after ÷ before of each pair: the median of blocks that ran beside each other."""
        pairs = [(one.blocks_ms, other.blocks_ms) for one, other in self.pairs]
        fewest = [min(map(len, pair)) for pair in pairs]
        return np.array([np.median(np.log(b[:n] / a[:n])) for (a, b), n in zip(pairs, fewest, strict=True)])

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
        """Returns whether a change is known to a part of it, or none of a size that matters is left to be found."""
        n = len(self.pairs)
        return self._half_width(n) <= max(NARROW, PART * abs(self._logarithms.mean()) if self.change.is_change else 0)

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
        """Returns half the interval after so many pairs that differ as those do that are there."""
        t, n = _t_for_ever(pairs), len(self.pairs)
        return t * float(self._logarithms.std(ddof=1)) / math.sqrt(pairs) if n > 1 and math.isfinite(t) else math.inf

    def other_work(self) -> Iterator[str]:
        """Yields why the programs do not compute the same, a sentence each."""
        sides = list(zip(*self.pairs, strict=True))
        rows = [float(np.median([row for one in side for row in one.rows] or [0])) for side in sides]
        if all(rows) and abs(rows[1] - rows[0]) > _ROWS * rows[0]:
            yield f"A step computes {rows[0]:,.0f} rows before, and {rows[1]:,.0f} after: another batch"
        losses = [_table([one.losses for one in side]) for side in sides]
        steps = min(len(of_side[0]) for of_side in losses)
        if not steps:
            return
        before, after = (of_side[:, :steps] for of_side in losses)
        middle = [side.mean(axis=0) for side in (before, after)]
        deviation = (
            np.sqrt(sum(np.nan_to_num(side.var(axis=0, ddof=1)) for side in (before, after)))
            if len(self.pairs) > 1
            else 0.0
        )
        allowed = np.maximum(_LOSSES * np.nanmax(np.abs(middle[0])), _DEVIATIONS * deviation)
        apart = ~np.isclose(middle[1], middle[0], rtol=0, atol=allowed, equal_nan=True)
        if apart.any():
            step = int(np.argmax(apart))
            yield f"Loss {step + 1} is {middle[0][step]:.4g} before, and {middle[1][step]:.4g} after"

    @property
    def is_seen(self) -> bool:
        """Returns whether losses of both are known."""
        return all(one.losses for pair in self.pairs for one in pair)


def _table(losses: list[tuple[float, ...]]) -> Floats:
    """Returns as many losses of each process as all of them have."""
    fewest = min(map(len, losses))
    return np.array([one[:fewest] for one in losses], np.float64)


def _t_for_ever(pairs: int) -> float:
    """Returns how far Student's t gets from 0 at this number of pairs in 1 of 20 series that it ever gets so far in.

    The Bayes factor of a normally distributed size of the change ÷ its deviation, against none, exceeds 20 at any time
    in no more than 1 of 20 unchanged series (Ville's inequality); where it is 20, t is what is returned.
    """
    wide = 1 + pairs * _SOUGHT
    ratio = (math.sqrt(wide) / _LEVEL) ** (2 / pairs)
    return math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / wide)) if ratio < wide else math.inf
