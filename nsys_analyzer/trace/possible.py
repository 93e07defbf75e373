"""Rows whose times cannot be true: found as a trace is read, left out of every figure, and told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Ints, distinct
from nsys_analyzer.trace.schema import NO_TIME, Table

#: Nothing that one trace holds lies a year from the start of its session, where times count from.
FAR = 365 * 24 * 3600 * 10**9
#: By how much rows lie outside the session that an export tells: NVTX ranges and API calls do by milliseconds.
_SLACK = 10**9
_MOST = 0.9
#: Without a word of the session, how much longer than all else a row may last: a range around a long wait, say.
_TIMES, _LEAST = 10, 600 * 10**9


@dataclass(frozen=True)
class LeftOut:
    """Rows of one table and one process that were left out of every figure.

    Attributes:
        process: global process ID.
        table: the table's name.
        rows: how many.
        why: what they have that is wrong.
        example: the first of them.
    """

    process: int
    table: str
    rows: int
    why: str
    example: str


@dataclass(frozen=True)
class Bounds:
    """Between what times the rows of a trace can lie, ns."""

    first: int
    last: int

    @classmethod
    def of(cls, duration: int | None, *moments: Ints, start: int = 0) -> Bounds:
        """The bounds from the duration of the session, else from moments of which most are true.

        Args:
            duration: ns from the start of the session to its end, None where that is not known.
            moments: the starts of API calls and ranges, or of whatever there is, ns.
            start: the session's, ns: 0 but in an export whose times were shifted.
        """
        total = _MOST * sum(map(len, moments))
        if sum(_count(some, start - FAR, start + FAR) for some in moments) < total:
            # Not the rows are wrong, but what is known of the session: times may count from 1970.
            start, duration = int(np.median(np.concatenate(moments))), None
        if duration is not None and sum(_count(some, start - FAR, start + duration) for some in moments) >= total:
            return cls(start - FAR, start + duration + _SLACK)
        likely = [near for some in moments if len(near := some[(some > start - FAR) & (some < start + FAR)])]
        if not likely:
            return cls(start - FAR, start + FAR)
        first, last = min(int(some.min()) for some in likely), max(int(some.max()) for some in likely)
        return cls(start - FAR, last + _TIMES * (last - first) + _LEAST)


def _count(times: Ints, first: int, last: int) -> int:
    return int(np.count_nonzero((times >= first) & (times <= last)))


def faults(start: Ints, end: Ints, bounds: Bounds, *, on_gpu: bool = False) -> Iterator[tuple[str, Bools]]:
    """What is wrong with some rows, in words, and which rows it is wrong with: each row once.

    Args:
        start, end: shape (rows,), ns; ``NO_TIME`` where the file holds none.
        bounds: between what times they can lie.
        on_gpu: whether they are CUPTI's activities: it writes 0 for both where it could not collect the times.
    """
    unknown = (start == NO_TIME) | (end == NO_TIME)
    if on_gpu:
        unknown |= (start == 0) & (end == 0)
    backwards = ~unknown & (end < start)
    outside = ~unknown & ~backwards & ((start < bounds.first) | (end > bounds.last))
    for why, wrong in (
        ("no times", unknown),
        ("an end before the start", backwards),
        ("a time outside the capture", outside),
    ):
        if wrong.any():
            yield why, wrong


class Sieve:
    """Tells the rows of one trace whose times can be true, and keeps account of the others.

    Args:
        bounds: between what times rows can lie.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.left_out: list[LeftOut] = []

    def sound(
        self, table: Table, start: Ints, end: Ints, process: Ints, describe: Callable[[int], str], *,
        on_gpu: bool = False,
    ) -> Bools:  # fmt: skip
        """Shape (rows,): True for the rows of a table to keep.

        Args:
            table: the table.
            start, end: shape (rows,), ns; ``NO_TIME`` where the file holds none.
            process: shape (rows,), global process IDs.
            describe: a row in words, by its index.
            on_gpu: whether they are CUPTI's activities.
        """
        kept = np.ones(len(start), np.bool_)
        for why, wrong in faults(start, end, self._bounds, on_gpu=on_gpu):
            kept &= ~wrong
            self.left_out += tell(table, why, wrong, process, lambda i: f"{describe(i)}{interval(start[i], end[i])}")
        return kept


def tell(table: Table, why: str, wrong: Bools, process: Ints, describe: Callable[[int], str]) -> Iterator[LeftOut]:
    """The rows of a table with one fault, for each process.

    Args:
        table: the table.
        why: the fault.
        wrong: shape (rows,), which rows have it.
        process: shape (rows,), global process IDs.
        describe: a row in words, by its index.
    """
    index = np.flatnonzero(wrong)
    for one in distinct(process[index]).tolist():
        mine = index[process[index] == one]
        yield LeftOut(one, table.aliases[0], len(mine), why, describe(int(mine[0])))


def interval(start: Any, end: Any) -> str:
    """The times of a row in words."""
    return ", " + " to ".join("unknown" if time == NO_TIME else f"{int(time):,}" for time in (start, end)) + " ns"
