"""Where the whole sequence of a device's work repeats: by lag identity, the longest stretch that equals itself shifted.

A sequence of passes equals itself shifted by one pass, from its first operation to its last. Shifted by one layer it is
also equal almost everywhere, but not across the ends of a pass: the period of the layers holds one pass, the period of
the passes holds all. So the best period is the one that repeats over most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct_rows

#: The repeats hold at least this share of the time.
_MOST = 0.8
#: Of the operations of a period this share is the same in the next one, at least; and of those of all periods.
_ALIKE, _ALIKE_IN_ALL = 0.9, 0.95
#: Operations that are looked at for periods, and of all pairs at a lag the share that is the same, at least.
_LONGEST, _LIKELY = 1 << 18, 0.5
#: How often that share is estimated, and the error of the mean.
_DIRECTIONS, _NOISE = 2, 0.3
#: Layers: so many, each of so many operations, which hold this share of a pass at least.
_LAYERS, _SMALLEST_LAYER, _OF_LAYERS, _LIKELY_LAYERS = 3, 5, 0.15, 0.1
#: A multiple of a period is one itself where so much more is the same a period later.
_MORE = 0.03
#: Operations by which the first one of a period is told from others.
_HEAD = 64


@dataclass(frozen=True)
class Repeats:
    """A period that repeats: a unit, and where in the sequence it begins.

    Attributes:
        period: operations of a unit.
        starts: where each whole unit begins, in order.
        end: behind the last whole unit.
        before, behind: operations before the first that repeats and behind the last: of no unit, nor of a part of one.
    """

    period: int
    starts: Ints
    end: int
    before: int
    behind: int


def find_repeats(
    symbols: Integers, ns: Ints, pause: Ints, count: int = 0, first: Bools | None = None
) -> Iterator[Repeats]:
    """Yields the periods at which a sequence of operations repeats over most of the time, the best first.

    A unit is never a part of one launch. The periods of operations come first, then those of whole launches.

    Args:
        symbols: shape (operations,), what each operation is, from 0 on.
        ns: shape (operations,), how long each takes.
        pause: shape (operations,), the time between the one before and it: units begin behind the longest pause.
        count: how many units there are; 0 where that is not known.
        first: shape (operations,), False for what is launched together with the one before, as the nodes of a graph.
    """
    if first is None or first.all():
        yield from _repeats_of(symbols, ns, pause, count)
        return
    yield from (repeats for repeats in _repeats_of(symbols, ns, pause, count) if first[repeats.starts].all())
    # The symbol of a launch is its content: the sum of a random number for each of its symbols, and their count.
    starts = np.flatnonzero(first)
    numbers = np.random.default_rng(0).integers(1 << 40, size=int(symbols.max()) + 1)
    bounds = np.append(starts, len(symbols))
    _, launched = distinct_rows(np.add.reduceat(numbers[symbols], starts), np.diff(bounds))
    for repeats in _repeats_of(launched, np.add.reduceat(ns, starts), pause[starts], count):
        unit, behind = repeats.starts[0], len(symbols) - int(bounds[len(starts) - repeats.behind])
        period = int(bounds[unit + repeats.period] - bounds[unit])
        yield Repeats(period, bounds[repeats.starts], int(bounds[repeats.end]), int(bounds[repeats.before]), behind)


def _repeats_of(symbols: Integers, ns: Ints, pause: Ints, count: int) -> Iterator[Repeats]:
    """Yields the periods of one sequence, whatever is launched together."""
    total, running = float(ns.sum()), np.append(0, np.cumsum(ns))
    candidates = []
    for period in _periods(symbols):
        first, behind, alike = _longest_run(symbols, period)
        if alike < _ALIKE_IN_ALL or behind - first < 2 * period:
            continue
        starts = _starts(symbols, pause, period, first, behind)
        end = int(min(starts[-1] + period, len(symbols)))
        low, high = min(first, int(starts[0])), max(behind, end)
        # Where the same follows to the end of all, what sets the program up before may take longer.
        to_the_end = alike == 1 and (first, behind) == (starts[0], len(symbols)) and len(starts) >= _LAYERS
        held = behind - first if to_the_end else running[high] - running[low]
        if held < _MOST * (len(symbols) if to_the_end else total) or count not in (0, len(starts)):
            continue
        # Few operations more between two units do not end the stretch.
        regular, until = _longest(np.abs(np.diff(np.append(starts, end)) - period) <= (1 - _ALIKE) * period)
        bounds = np.append(starts, end)
        held = max(running[behind] - running[first], running[bounds[until]] - running[bounds[regular]])
        repeats = Repeats(period, starts, end, low, len(symbols) - high)
        candidates.append((-alike * float(held), period, repeats))
    yield from (repeats for _, _, repeats in sorted(candidates, key=lambda each: each[:2]))


def has_layers(symbols: Integers, computes: Bools) -> bool:
    """Whether some part of a sequence repeats as the layers of a model do; ``computes`` are what computes in one."""
    for period in _periods(symbols, _LIKELY_LAYERS):
        first, behind, _ = _longest_run(symbols, period)
        repeats = (behind - first) // period
        is_large = period >= _SMALLEST_LAYER and behind - first >= _OF_LAYERS * len(symbols)
        if is_large and repeats >= _LAYERS and computes[first : first + period].any():
            return True
    return False


def _periods(symbols: Integers, likely: float = _LIKELY) -> Iterator[int]:
    """The lags at which a sequence is likely to equal itself, without those that are multiples of a better one."""
    middle = max(0, len(symbols) - _LONGEST) // 2
    some = symbols[middle : middle + _LONGEST]
    if len(some) < 2:
        return
    # Of random directions only equal ones add up: the autocorrelation is the number of equal pairs, and some noise.
    random, equal = np.random.default_rng(0), np.zeros(len(some) // 2)
    for _ in range(_DIRECTIONS):
        direction = np.exp(2j * np.pi * random.random(int(some.max()) + 1))
        spectrum = np.fft.fft(direction[some], 2 * len(some))
        equal += np.fft.ifft(np.abs(spectrum) ** 2).real[1 : len(equal) + 1] / _DIRECTIONS
    estimated = equal / (len(some) - np.arange(1, len(equal) + 1))
    kept: dict[int, float] = {}
    for lag in (np.flatnonzero(estimated >= likely - _NOISE) + 1).tolist():
        identity = float((some[:-lag] == some[lag:]).mean())
        if identity >= likely and not any(lag % one == 0 and kept[one] >= identity - _MORE for one in kept):
            kept[lag] = identity
            yield lag


def _longest_run(symbols: Integers, period: int) -> tuple[int, int, float]:
    """The longest stretch of units each of which is like the next.

    Returns:
        Its first operation, the one behind its last, and the share of operations that are the same a period later.
    """
    same = symbols[:-period] == symbols[period:]
    equal = np.append(0, np.cumsum(same))
    first, last = _longest(equal[period:] - equal[:-period] >= _ALIKE * period)
    if first == last:
        return 0, 0, 0.0
    # At its ends the stretch may hold a tenth of a unit that is not alike.
    inside = first + np.flatnonzero(same[first : last + period - 1])
    first, behind = int(inside[0]), int(inside[-1]) + 1
    return first, behind + period, float(same[first:behind].mean())


def _longest(true: Bools) -> tuple[int, int]:
    """The bounds of the longest stretch of true values; (0, 0) where none is."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], true, [False]])))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])


def _starts(symbols: Integers, pause: Ints, period: int, first: int, behind: int) -> Ints:
    """Where the units begin: at the first operation where nothing is left over, else behind the longest pause."""
    whole = (behind - first) // period
    offset = first
    if behind < len(symbols) or (behind - first) % period:
        table = pause[first : first + whole * period].reshape(whole, period)
        offset += int(np.argmax(np.median(table[1:] if whole > 1 else table, axis=0)))
    starts = np.arange(offset, behind - period + 1, period)
    # The same operations begin the units that a longer one between them has moved. One of three is like the others.
    tried = sorted({int(starts[0]), int(starts[len(starts) // 2]), int(starts[-1])})
    heads = max((_like_head(symbols, one, min(period, _HEAD)) for one in tried), key=len)
    inside = heads[(heads >= first) & (heads < behind)]
    if len(inside) > whole + 1:  # they do not tell a unit's first operation from others
        return starts
    return heads[: -1 if len(symbols) - heads[-1] < _ALIKE * period else None]


def _like_head(symbols: Integers, offset: int, length: int) -> Ints:
    """Where the same operations follow as at one place."""
    found = np.arange(len(symbols) - length + 1)
    for place in range(length):
        found = found[symbols[found + place] == symbols[offset + place]]
    return found
