"""Times in nanoseconds, from microseconds with any number of digits."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

import numpy as np

from nsys_analyzer.trace.arrays import Ints

_LIMIT_NS = 2**61  # the difference of two such times, and a duration more, fit into 64 bits
_LIMIT_US = Decimal(_LIMIT_NS) / 1000
_LARGEST = 10**18  # what has more digits may not fit into 64 bits
_MOST_DIGITS = 18
_PLAIN = b"0123456789.-,"


def nanoseconds(microseconds: Decimal) -> int | None:
    """A time in ns, half to even; None where no trace can hold it."""
    if not microseconds.is_finite() or not -_LIMIT_US < microseconds < _LIMIT_US:
        return None
    return round(microseconds * 1000)


def all_nanoseconds(texts: Iterable[bytes]) -> Ints | None:
    """What :func:`nanoseconds` makes of each number of a JSON, all at once.

    None where one is not plain: it has more digits than fit, an exponent, or is no number or no time.
    """
    text = b",".join(texts) + b","
    if text.translate(None, _PLAIN) or b",," in text or text.startswith(b","):
        return None
    numbers = np.fromstring(text.replace(b".", b""), np.int64, sep=",")
    decimals = _decimals(text)
    if numbers.max() >= _LARGEST or numbers.min() <= -_LARGEST or decimals.max() > _MOST_DIGITS:
        return None
    if (decimals == 3).all():  # as Kineto writes them
        return numbers
    scale = 10 ** np.abs(3 - decimals)
    if (np.abs(numbers) >= np.where(decimals < 3, _LIMIT_NS // scale, _LARGEST)).any():
        return None
    rounded, rest = np.divmod(numbers, scale)
    rounded += (2 * rest > scale) | ((2 * rest == scale) & (rounded % 2 == 1))
    return np.where(decimals <= 3, numbers * scale, rounded)


def _decimals(text: bytes) -> Ints:
    """How many digits follow the point of each number, 0 without one; a comma ends each."""
    characters = np.frombuffer(text, np.uint8)
    ends, points = np.flatnonzero(characters == ord(",")), np.flatnonzero(characters == ord("."))
    decimals = np.zeros(len(ends), np.int64)
    which = slice(None) if len(points) == len(ends) else np.searchsorted(ends, points)
    decimals[which] = ends[which] - points - 1
    return decimals
