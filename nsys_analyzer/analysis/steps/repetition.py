"""Finds the period at which the whole sequence of a device's work repeats.

A sequence of passes is equal to itself shifted by one pass, from its first operation to its last. Shifted by one layer,
it is also equal almost everywhere, but not across the ends of a pass: the period of the layers covers one pass, the
period of the passes covers all of them. So the best period is the one that repeats over most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct_rows

#: The units of a period cover at least this share of the time.
_MIN_COVERED_TIME = 0.8
#: At least this share of the operations of a unit is the same in the next unit.
_MIN_SAME_IN_UNIT = 0.9
#: At least this share of the operations of all units is the same one period later.
_MIN_SAME_IN_ALL = 0.95
#: Periods are looked for among this many operations in the middle.
_OPERATIONS_SEARCHED = 1 << 18
#: A lag may be a period if at least this share of all pairs of operations at the lag is the same.
_MIN_SAME_AT_LAG = 0.5
#: That share is estimated from this many random projections. Their mean may be off by the second value.
_PROJECTIONS, _ESTIMATION_ERROR = 2, 0.3
#: A model has at least this many layers, with at least this many operations each.
_MIN_LAYERS, _MIN_OPERATIONS_OF_LAYER = 3, 5
#: The layers hold at least this share of a pass, so fewer pairs at a lag are the same.
_MIN_SHARE_OF_LAYERS, _MIN_SAME_AT_LAG_OF_LAYERS = 0.15, 0.1
#: A multiple of a period is a period of its own if at least this much more is the same at its lag.
_MIN_GAIN_OF_MULTIPLE = 0.03
#: The first operation of a unit is recognized by the sequence of this many operations.
_HEAD_LENGTH = 64


@dataclass(frozen=True)
class Repeats:
    """A period that repeats: a unit, and where in the sequence it begins.

    Attributes:
        period: the number of operations in a unit.
        starts: the position at which each whole unit begins, in order.
        end: the position after the last whole unit.
        before, behind: the number of operations before and after everything that repeats.
    """

    period: int
    starts: Ints
    end: int
    before: int
    behind: int


def find_repeats(
    symbols: Integers, ns: Ints, pause: Ints, count: int = 0, begins_launch: Bools | None = None
) -> Iterator[Repeats]:
    """Yields the periods at which a sequence of operations repeats over most of the time, the best first.

    A unit is never a part of one launch. The periods of operations come first, then those of whole launches.

    Args:
        symbols: shape (operations,), a code for what each operation is, from 0 on.
        ns: shape (operations,), the duration of each operation.
        pause: shape (operations,), the time since the operation before it: units begin after the longest pause.
        count: the number of units; 0 if it is unknown.
        begins_launch: shape (operations,), False for an operation that is launched together with the one before, as the
            nodes of a CUDA graph are.
    """
    if begins_launch is None or begins_launch.all():
        yield from _repeats_of(symbols, ns, pause, count)
        return
    yield from (repeats for repeats in _repeats_of(symbols, ns, pause, count) if begins_launch[repeats.starts].all())
    # Launches are equal if they have as many operations, and the same sum of a random number for each symbol.
    starts = np.flatnonzero(begins_launch)
    numbers = np.random.default_rng(0).integers(1 << 40, size=int(symbols.max()) + 1)
    bounds = np.append(starts, len(symbols))
    _, launched = distinct_rows(np.add.reduceat(numbers[symbols], starts), np.diff(bounds))
    for repeats in _repeats_of(launched, np.add.reduceat(ns, starts), pause[starts], count):
        unit, behind = repeats.starts[0], len(symbols) - int(bounds[len(starts) - repeats.behind])
        period = int(bounds[unit + repeats.period] - bounds[unit])
        yield Repeats(period, bounds[repeats.starts], int(bounds[repeats.end]), int(bounds[repeats.before]), behind)


def _repeats_of(symbols: Integers, ns: Ints, pause: Ints, count: int) -> Iterator[Repeats]:
    """Yields the periods of one sequence, without regard to launches."""
    total, running = float(ns.sum()), np.append(0, np.cumsum(ns))
    candidates = []
    for period in _periods(symbols):
        first, behind, same_share = _longest_repeating_stretch(symbols, period)
        if same_share < _MIN_SAME_IN_ALL or behind - first < 2 * period:
            continue
        starts = _find_unit_starts(symbols, pause, period, first, behind)
        end = int(min(starts[-1] + period, len(symbols)))
        low, high = min(first, int(starts[0])), max(behind, end)
        # If equal units follow to the very end, the program may have taken longer to start up: operations are counted.
        is_exact = same_share == 1 and (first, behind) == (starts[0], len(symbols)) and len(starts) >= _MIN_LAYERS
        covered = behind - first if is_exact else running[high] - running[low]
        if covered < _MIN_COVERED_TIME * (len(symbols) if is_exact else total) or count not in (0, len(starts)):
            continue
        # A few operations more between two units do not end the stretch.
        bounds = np.append(starts, end)
        is_regular = np.abs(np.diff(bounds) - period) <= (1 - _MIN_SAME_IN_UNIT) * period
        first_regular, end_regular = _longest_stretch(is_regular)
        regular_ns = running[bounds[end_regular]] - running[bounds[first_regular]]
        covered_ns = max(running[behind] - running[first], regular_ns)
        repeats = Repeats(period, starts, end, low, len(symbols) - high)
        candidates.append((-same_share * float(covered_ns), period, repeats))
    yield from (repeats for _, _, repeats in sorted(candidates, key=lambda candidate: candidate[:2]))


def has_layers(symbols: Integers, computes: Bools) -> bool:
    """Checks whether some part of a sequence repeats as the layers of a model do.

    Args:
        symbols: shape (operations,), a code for what each operation is, from 0 on.
        computes: shape (operations,), whether each operation does what a layer computes.
    """
    for period in _periods(symbols, _MIN_SAME_AT_LAG_OF_LAYERS):
        first, behind, _ = _longest_repeating_stretch(symbols, period)
        repeats = (behind - first) // period
        is_large = period >= _MIN_OPERATIONS_OF_LAYER and behind - first >= _MIN_SHARE_OF_LAYERS * len(symbols)
        if is_large and repeats >= _MIN_LAYERS and computes[first : first + period].any():
            return True
    return False


def _periods(symbols: Integers, min_same: float = _MIN_SAME_AT_LAG) -> Iterator[int]:
    """Yields the lags at which a sequence may be equal to itself, without the multiples of a lag that is as good."""
    middle = max(0, len(symbols) - _OPERATIONS_SEARCHED) // 2
    sequence = symbols[middle : middle + _OPERATIONS_SEARCHED]
    if len(sequence) < 2:
        return
    # Each symbol becomes a random direction. Only equal directions add up, so the autocorrelation at a lag is the
    # number of equal pairs and some noise.
    random, equal = np.random.default_rng(0), np.zeros(len(sequence) // 2)
    for _ in range(_PROJECTIONS):
        direction = np.exp(2j * np.pi * random.random(int(sequence.max()) + 1))
        spectrum = np.fft.fft(direction[sequence], 2 * len(sequence))
        equal += np.fft.ifft(np.abs(spectrum) ** 2).real[1 : len(equal) + 1] / _PROJECTIONS
    estimated_same = equal / (len(sequence) - np.arange(1, len(equal) + 1))
    same_at: dict[int, float] = {}
    for lag in (np.flatnonzero(estimated_same >= min_same - _ESTIMATION_ERROR) + 1).tolist():
        same = float((sequence[:-lag] == sequence[lag:]).mean())
        is_multiple = any(
            lag % shorter == 0 and same_at[shorter] >= same - _MIN_GAIN_OF_MULTIPLE for shorter in same_at
        )
        if same >= min_same and not is_multiple:
            same_at[lag] = same
            yield lag


def _longest_repeating_stretch(symbols: Integers, period: int) -> tuple[int, int, float]:
    """Returns the longest stretch in which each unit is like the next one.

    Returns:
        Its first operation, the operation after its last, and the share of operations that are the same a period later.
    """
    same = symbols[:-period] == symbols[period:]
    equal = np.append(0, np.cumsum(same))
    first, last = _longest_stretch(equal[period:] - equal[:-period] >= _MIN_SAME_IN_UNIT * period)
    if first == last:
        return 0, 0, 0.0
    # At each end, the stretch may hold a tenth of a unit that is different.
    inside = first + np.flatnonzero(same[first : last + period - 1])
    first, behind = int(inside[0]), int(inside[-1]) + 1
    return first, behind + period, float(same[first:behind].mean())


def _longest_stretch(mask: Bools) -> tuple[int, int]:
    """Returns the bounds of the longest stretch of true values, (0, 0) if there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])


def _find_unit_starts(symbols: Integers, pause: Ints, period: int, first: int, behind: int) -> Ints:
    """Returns where the units begin: at the first operation if no operation remains, else after the longest pause."""
    units = (behind - first) // period
    offset = first
    if behind < len(symbols) or (behind - first) % period:
        table = pause[first : first + units * period].reshape(units, period)
        offset += int(np.argmax(np.median(table[1:] if units > 1 else table, axis=0)))
    starts = np.arange(offset, behind - period + 1, period)
    # A longer unit moves the units after it, but they begin with the same operations. One of three units is typical.
    typical = sorted({int(starts[0]), int(starts[len(starts) // 2]), int(starts[-1])})
    heads = max((_find_same_heads(symbols, start, min(period, _HEAD_LENGTH)) for start in typical), key=len)
    inside = heads[(heads >= first) & (heads < behind)]
    if len(inside) > units + 1:  # these operations are found inside units, too
        return starts
    return heads[: -1 if len(symbols) - heads[-1] < _MIN_SAME_IN_UNIT * period else None]


def _find_same_heads(symbols: Integers, start: int, length: int) -> Ints:
    """Returns the positions at which the same operations follow as at ``start``."""
    positions = np.arange(len(symbols) - length + 1)
    for offset in range(length):
        positions = positions[symbols[positions + offset] == symbols[start + offset]]
    return positions
