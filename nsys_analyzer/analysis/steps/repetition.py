"""Finds the period at which the whole sequence of a device's work repeats.

A sequence of passes that is shifted by one pass equals the original sequence. If it is shifted by one layer, it equals
the original sequence within each pass, but not across the end of a pass. Repetition with the period of a layer
therefore covers only one pass, whereas repetition with the period of a pass covers the whole sequence. The best period
is the period whose repetition covers most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nsys_analyzer.trace.arrays import Bools, Integers, Ints, distinct_rows

#: A period is accepted only if its units cover at least this share of the total duration of all operations.
_MIN_COVERED_TIME_SHARE = 0.8
#: A unit repeats if at least this share of its operations is equal to the operations of the next unit.
_MIN_EQUAL_SHARE_IN_UNIT = 0.9
#: A period is accepted only if at least this share of all operations is equal to the operation one period later.
_MIN_EQUAL_SHARE_IN_SEQUENCE = 0.95
#: The maximum number of operations, in the middle of the sequence, among which periods are searched.
_MAX_SEARCHED_OPERATIONS = 1 << 18
#: A lag may be a period if both operations are equal in at least this share of the pairs that lie this lag apart.
_MIN_EQUAL_SHARE_AT_LAG = 0.5
#: The number of random mappings of symbols to numbers from which the share of equal pairs is estimated.
_RANDOM_MAPPINGS = 2
#: The assumed maximum error of the estimated share of equal pairs.
_MAX_ESTIMATION_ERROR = 0.3
#: A model has at least ``_MIN_LAYERS`` layers, and a layer has at least ``_MIN_OPERATIONS_OF_LAYER`` operations.
_MIN_LAYERS, _MIN_OPERATIONS_OF_LAYER = 3, 5
#: Repeating parts of a pass are layers only if they contain at least this share of the operations of the pass.
_MIN_SHARE_OF_LAYERS = 0.15
#: A lag may be the period of layers if at least this share of the pairs of operations at this lag is equal.
_MIN_EQUAL_SHARE_AT_LAG_OF_LAYERS = 0.1
#: A multiple of a period is preferred if its share of equal pairs exceeds the period's share by more than this.
_MIN_EQUAL_SHARE_GAIN_OF_MULTIPLE = 0.03
#: The number of operations at the start of a unit by which other units are recognized.
_UNIT_HEAD_LENGTH = 64


@dataclass(frozen=True)
class Repetition:
    """A period at which a sequence of operations repeats.

    Attributes:
        period: the number of operations in a unit.
        starts: the index of the first operation of each complete unit, in order.
        end: the index after the last operation of the last complete unit.
        operations_before, operations_after: the number of operations before and after the part of the sequence that
            repeats.
    """

    period: int
    starts: Ints
    end: int
    operations_before: int
    operations_after: int


def find_repeats(
    symbols: Integers, duration_ns: Ints, pause_ns: Ints, count: int = 0, begins_launch: Bools | None = None
) -> Iterator[Repetition]:
    """Yields the periods at which a sequence of operations repeats for most of the time, the best period first.

    A unit always consists of whole launches. Periods of the sequence of operations come first, then periods of the
    sequence of launches.

    Args:
        symbols: shape (operations,), a code of each operation from 0 on. Equal operations have equal codes.
        duration_ns: shape (operations,), the duration of each operation, ns.
        pause_ns: shape (operations,), the time since the previous operation, ns. Units begin after the longest pause.
        count: the number of units; 0 if it is unknown.
        begins_launch: shape (operations,), False for an operation that is launched together with the previous
            operation, as the nodes of a CUDA graph are.
    """
    if begins_launch is None or begins_launch.all():
        yield from _find_repetitions(symbols, duration_ns, pause_ns, count)
        return
    yield from (
        repeats
        for repeats in _find_repetitions(symbols, duration_ns, pause_ns, count)
        if begins_launch[repeats.starts].all()
    )
    # Two launches count as equal if they have the same number of operations and the same hash. The hash is the sum of
    # one random number per symbol.
    starts = np.flatnonzero(begins_launch)
    random_numbers = np.random.default_rng(0).integers(1 << 40, size=int(symbols.max()) + 1)
    bounds = np.append(starts, len(symbols))
    _, launch_codes = distinct_rows(np.add.reduceat(random_numbers[symbols], starts), np.diff(bounds))
    for repeats in _find_repetitions(launch_codes, np.add.reduceat(duration_ns, starts), pause_ns[starts], count):
        unit, after = repeats.starts[0], len(symbols) - int(bounds[len(starts) - repeats.operations_after])
        period = int(bounds[unit + repeats.period] - bounds[unit])
        yield Repetition(
            period, bounds[repeats.starts], int(bounds[repeats.end]), int(bounds[repeats.operations_before]), after
        )


def _find_repetitions(symbols: Integers, duration_ns: Ints, pause_ns: Ints, count: int) -> Iterator[Repetition]:
    """Yields the periods of one sequence, the best period first; see ``find_repeats``."""
    total, duration_before = float(duration_ns.sum()), np.append(0, np.cumsum(duration_ns))
    candidates = []
    for period in _find_candidate_periods(symbols):
        first, stop, same_share = _find_longest_repeating_part(symbols, period)
        if same_share < _MIN_EQUAL_SHARE_IN_SEQUENCE or stop - first < 2 * period:
            continue
        starts = _find_unit_starts(symbols, pause_ns, period, first, stop)
        end = int(min(starts[-1] + period, len(symbols)))
        repeating_start, repeating_end = min(first, int(starts[0])), max(stop, end)
        # If equal units follow each other up to the end, only the program's initialization precedes them. It may take
        # long, so the share of operations is compared instead of the share of time.
        is_exact = same_share == 1 and (first, stop) == (starts[0], len(symbols)) and len(starts) >= _MIN_LAYERS
        covered = stop - first if is_exact else duration_before[repeating_end] - duration_before[repeating_start]
        if covered < _MIN_COVERED_TIME_SHARE * (len(symbols) if is_exact else total) or count not in (0, len(starts)):
            continue
        # A few additional operations between two units do not end the repetition.
        bounds = np.append(starts, end)
        is_regular = np.abs(np.diff(bounds) - period) <= (1 - _MIN_EQUAL_SHARE_IN_UNIT) * period
        first_regular, end_regular = _find_longest_run(is_regular)
        regular_ns = duration_before[bounds[end_regular]] - duration_before[bounds[first_regular]]
        covered_ns = max(duration_before[stop] - duration_before[first], regular_ns)
        repeats = Repetition(period, starts, end, repeating_start, len(symbols) - repeating_end)
        candidates.append((-same_share * float(covered_ns), period, repeats))
    yield from (repeats for _, _, repeats in sorted(candidates, key=lambda candidate: candidate[:2]))


def has_layers(symbols: Integers, computes: Bools) -> bool:
    """Checks whether a part of a sequence repeats as the layers of a model do.

    Args:
        symbols: shape (operations,), a code of each operation from 0 on. Equal operations have equal codes.
        computes: shape (operations,), True if an operation has a class that every layer contains, such as matmul.
    """
    for period in _find_candidate_periods(symbols, _MIN_EQUAL_SHARE_AT_LAG_OF_LAYERS):
        first, stop, _ = _find_longest_repeating_part(symbols, period)
        repeats = (stop - first) // period
        is_large = period >= _MIN_OPERATIONS_OF_LAYER and stop - first >= _MIN_SHARE_OF_LAYERS * len(symbols)
        if is_large and repeats >= _MIN_LAYERS and computes[first : first + period].any():
            return True
    return False


def _find_candidate_periods(symbols: Integers, min_same: float = _MIN_EQUAL_SHARE_AT_LAG) -> Iterator[int]:
    """Yields the lags that may be periods of a sequence, without multiples of a lag that have no more equal pairs."""
    searched_start = max(0, len(symbols) - _MAX_SEARCHED_OPERATIONS) // 2
    sequence = symbols[searched_start : searched_start + _MAX_SEARCHED_OPERATIONS]
    if len(sequence) < 2:
        return
    # Each symbol is mapped to a random complex number of absolute value 1. In the autocorrelation, only the products of
    # equal symbols add up, so its value at a lag is the number of equal pairs plus noise.
    generator, equal_pairs = np.random.default_rng(0), np.zeros(len(sequence) // 2)
    for _ in range(_RANDOM_MAPPINGS):
        number_of_symbol = np.exp(2j * np.pi * generator.random(int(sequence.max()) + 1))
        spectrum = np.fft.fft(number_of_symbol[sequence], 2 * len(sequence))
        equal_pairs += np.fft.ifft(np.abs(spectrum) ** 2).real[1 : len(equal_pairs) + 1] / _RANDOM_MAPPINGS
    estimated_same = equal_pairs / (len(sequence) - np.arange(1, len(equal_pairs) + 1))
    equal_share_of_lag: dict[int, float] = {}
    for lag in (np.flatnonzero(estimated_same >= min_same - _MAX_ESTIMATION_ERROR) + 1).tolist():
        equal_share = float((sequence[:-lag] == sequence[lag:]).mean())
        is_multiple = any(
            lag % shorter_lag == 0
            and equal_share_of_lag[shorter_lag] >= equal_share - _MIN_EQUAL_SHARE_GAIN_OF_MULTIPLE
            for shorter_lag in equal_share_of_lag
        )
        if equal_share >= min_same and not is_multiple:
            equal_share_of_lag[lag] = equal_share
            yield lag


def _find_longest_repeating_part(symbols: Integers, period: int) -> tuple[int, int, float]:
    """Finds the longest part of a sequence in which each unit repeats in the next unit.

    Returns:
        The index of the first operation of this part, the index after its last operation, and the share of its
        operations that are equal to the operation one period later.
    """
    is_equal = symbols[:-period] == symbols[period:]
    equal_until = np.append(0, np.cumsum(is_equal))
    first, last = _find_longest_run(equal_until[period:] - equal_until[:-period] >= _MIN_EQUAL_SHARE_IN_UNIT * period)
    if first == last:
        return 0, 0, 0.0
    # At each end of this part, up to a tenth of a unit may differ. Remove the operations that differ.
    equal_positions = first + np.flatnonzero(is_equal[first : last + period - 1])
    first, stop = int(equal_positions[0]), int(equal_positions[-1]) + 1
    return first, stop + period, float(is_equal[first:stop].mean())


def _find_longest_run(mask: Bools) -> tuple[int, int]:
    """Returns the bounds [first, end) of the longest run of True values, or (0, 0) if there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    if not len(edges):
        return 0, 0
    longest_run = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest_run]), int(edges[2 * longest_run + 1])


def _find_unit_starts(symbols: Integers, pause_ns: Ints, period: int, first: int, stop: int) -> Ints:
    """Returns the index of the first operation of each unit.

    If whole units extend to the end of the sequence, the first unit begins at ``first``. Otherwise, each unit begins
    after the longest pause.
    """
    units = (stop - first) // period
    offset = first
    if stop < len(symbols) or (stop - first) % period:
        table = pause_ns[first : first + units * period].reshape(units, period)
        offset += int(np.argmax(np.median(table[1:] if units > 1 else table, axis=0)))
    starts = np.arange(offset, stop - period + 1, period)
    # A longer unit shifts the units after it, so units are found by their first operations. The first operations of the
    # first, the middle or the last unit are searched, whichever are found most often.
    typical_starts = sorted({int(starts[0]), int(starts[len(starts) // 2]), int(starts[-1])})
    head_starts = max(
        (_find_same_heads(symbols, start, min(period, _UNIT_HEAD_LENGTH)) for start in typical_starts), key=len
    )
    heads_inside = head_starts[(head_starts >= first) & (head_starts < stop)]
    # If there are more heads than units, the operations of a head also occur inside units, and mark no start.
    if len(heads_inside) > units + 1:
        return starts
    return head_starts[: -1 if len(symbols) - head_starts[-1] < _MIN_EQUAL_SHARE_IN_UNIT * period else None]


def _find_same_heads(symbols: Integers, start: int, length: int) -> Ints:
    """Returns each index from which ``length`` operations are equal to the operations from ``start``."""
    positions = np.arange(len(symbols) - length + 1)
    for offset in range(length):
        positions = positions[symbols[positions + offset] == symbols[start + offset]]
    return positions
