"""How figures are written: one place for digits, units and thousands."""

from __future__ import annotations

import math

from nsys_analyzer.report.model import Cell, Interval, MedianRange, SignedChange, Spread, Unit
from nsys_analyzer.text import MAX_DECIMALS, StrOrText, Text, code, format_fixed, plural
from nsys_analyzer.text import NO_BREAK_SPACE as _SPACE
from nsys_analyzer.text import rounded as rounded
from nsys_analyzer.text import rounded_percent as rounded_percent

#: What the times of a request are called, and what a decode step cannot do without: of captures and of experiments.
TTFT, INTER_TOKEN, TOKENS_PER_S = "TTFT", "inter-token latency", "tokens/s"
LEAST_READ = "every weight but the embedding, and what the cache holds"
ABSENT = "–"
_MINUS = "\N{MINUS SIGN}"
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_ROUNDS_UP_TO_A_TENTH = 0.99995  # of a binary unit: 1,024.0 MiB is 1.0 GiB
_BAR = 12  # letters of a whole bar
_ROUNDS_UP = 0.9995  # of a prefix: in three digits, 999.7 G is 1 T


def format_cell(value: Cell, unit: Unit) -> StrOrText:
    """A cell as text; None is a dash."""
    if value is None:
        return ABSENT
    if isinstance(value, str | Text):
        return code(value) if unit == "code" and value else value
    if isinstance(value, Spread):
        std = "" if value.std is None else f"{_SPACE}±{_SPACE}{value.std:,.{_decimals(value.mean)}f}"
        return format_number(value.mean, unit) + std
    if isinstance(value, MedianRange):
        return _typical(value)
    if isinstance(value, Interval):
        return _between(value.low, value.high, f"{_SPACE}–{_SPACE}")
    if isinstance(value, SignedChange):
        return format_change(value, unit)
    return format_number(value, unit)


def format_change(shift: SignedChange, unit: Unit) -> str:
    """A change with its sign, and in brackets its interval: −14.90 (−15.10 to −14.70)."""
    sizes = [abs(one) for one in (shift.value, shift.low, shift.high) if one is not None]
    value, low, high = (
        None if one is None else _signed(one, max(sizes), unit) for one in (shift.value, shift.low, shift.high)
    )
    return str(value) if low is None or high is None else f"{value} ({low} to {high})"


def _signed(value: float, largest: float, unit: Unit) -> str:
    """A number with its sign, in the digits that the largest of its row has."""
    if unit == "percent":
        digits = 1 if largest < 1 else 0
        text, scaled = f"{abs(value):.{digits}%}".replace("%", f"{_SPACE}%"), round(value, digits + 2)
    else:
        digits = _decimals(largest)
        text, scaled = f"{abs(value):,.{digits}f}", round(value, digits)
    return f"{_MINUS if scaled < 0 else '+' if scaled > 0 else ''}{text}"


def _typical(value: MedianRange) -> str:
    """The median, and in brackets the range, in no more digits than the range leaves a meaning."""
    spread = value.most - value.least
    fewest = max(0, 1 - math.floor(math.log10(spread))) if spread > 0 else _decimals(value.median)
    places = min(_decimals(value.median), fewest)
    median, least, most = (format_fixed(number, places) for number in (value.median, value.least, value.most))
    # No-break spaces around the dash: a line may break behind a bare one.
    return median if least == most else f"{median}{_SPACE}({least}{_SPACE}–{_SPACE}{most})"


def _between(low: float, high: float, dash: str) -> str:
    """Both bounds in the digits in which they differ, two or three of the larger one; one number where they agree."""
    low, high = round(low, MAX_DECIMALS), round(high, MAX_DECIMALS)
    first = math.floor(math.log10(high)) if high > 0 else 0
    apart = -math.floor(math.log10(high - low)) if high > low else 2 - first
    places = min(max(1 - first, apart, 0), max(2 - first, 0))
    least, most = (format_fixed(number, places) for number in (low, high))
    return least if least == most else f"{least}{dash}{most}"


def format_number(value: float, unit: Unit) -> str:
    """A number in the digits its unit deserves; units of time stand in the column's title, others here."""
    if unit == "count":
        return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.1f}"
    if unit == "percent":
        rounded = round(value, 3) + 0.0  # no minus before a zero
        return f"{rounded:.1%}".replace("%", f"{_SPACE}%").replace("-", _MINUS)
    if unit == "bar":
        return "\N{DARK SHADE}" * max(round(value * _BAR), 1)
    if unit in ("flop", "flop/s"):
        return _scaled(value, "FLOP" + ("/s" if unit == "flop/s" else ""))
    if unit == "bytes":
        return _binary(value)
    if unit == "bytes/s":
        return _scaled(value, "B/s")
    return f"{_digits(value)}×" if unit == "factor" else _digits(value)


def _binary(value: float) -> str:
    """Bytes in the binary unit that leaves one to four digits before the point."""
    scale, unit = next(((s, u) for s, u in _BINARY if abs(value) >= s * _ROUNDS_UP_TO_A_TENTH), (1, "B"))
    return f"{value / scale:,.1f}{_SPACE}{unit}" if scale > 1 else f"{value:.0f}{_SPACE}B"


def _digits(value: float) -> str:
    """Four digits or more: 5.335, 40.19, 3,100.2."""
    return format_fixed(value, _decimals(value))


def _decimals(value: float) -> int:
    return 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1


def _scaled(value: float, unit: str) -> str:
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s * _ROUNDS_UP), (1.0, ""))
    return f"{value / scale:.3g}{_SPACE}{prefix}{unit}"


def format_count(number: float, noun: str) -> str:
    """A number of things, for sentences: 1 launch, 0.5 launches, 644 launches."""
    written = format_number(number, "count")
    return f"{written}{_SPACE}{plural(1 if written == '1' else number, noun)}"


def format_precise_ms(value: float | None) -> str:
    """A time with its unit, for sentences."""
    return "an unknown time" if value is None else f"{_digits(value)}{_SPACE}ms"


def format_ms_range(low: float, high: float) -> str:
    """A time between two bounds with its unit, for sentences: 41–45 ms."""
    return f"{_between(low, high, '–')}{_SPACE}ms"


def format_ms(value: float) -> str:
    """A time in three digits with its unit, for sentences: 88 ms, 9.37 ms."""
    return f"{rounded(value)}{_SPACE}ms"


def format_percent(value: float) -> str:
    """A fraction as a percentage, for sentences."""
    return format_number(value, "percent")
