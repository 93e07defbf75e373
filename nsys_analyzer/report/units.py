"""Formats figures for people: the only place that decides on digits, units and thousands separators."""

from __future__ import annotations

import math

from nsys_analyzer.report.model import Cell, Interval, MedianRange, SignedChange, Spread, Unit
from nsys_analyzer.text import MAX_DECIMALS, StrOrText, Text, code, format_fixed, plural
from nsys_analyzer.text import NO_BREAK_SPACE as _SPACE
from nsys_analyzer.text import format_bytes as format_bytes
from nsys_analyzer.text import rounded as rounded
from nsys_analyzer.text import rounded_percent as rounded_percent

#: The names of the latencies and the rate of requests, in reports on captures and on experiments.
TTFT, INTER_TOKEN_LATENCY, TOKENS_PER_S = "TTFT", "inter-token latency", "tokens/s"
#: The data that a decode step must read at least once.
LEAST_READ_DATA = "every weight except the embedding, and the contents of the KV cache"
#: The cell of a figure that does not exist.
MISSING_CELL = "–"
_DECIMAL_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
#: A value gets a prefix if it is at least this share of the prefix's factor, so that 999.7 G is written as 1 T.
_PREFIX_THRESHOLD = 0.9995
#: The number of characters of a bar for 100 %.
_FULL_BAR_LENGTH = 12
#: The maximum number of tensors in the description of an operator's shapes.
_MAX_SHAPES = 3


def format_cell(value: Cell, unit: Unit) -> StrOrText:
    """Returns the value of a cell as text, with its unit; a dash for None."""
    if value is None:
        return MISSING_CELL
    if isinstance(value, str | Text):
        return code(value) if unit == "code" and value else value
    if isinstance(value, Spread):
        std = "" if value.std is None else f"{_SPACE}±{_SPACE}{format_fixed(value.std, _decimal_places(value.mean))}"
        return format_number(value.mean, unit) + std
    if isinstance(value, MedianRange):
        # The range shows how many decimal places of the median are meaningful.
        width, places = value.most - value.least, _decimal_places(value.median)
        places = min(places, max(0, 1 - math.floor(math.log10(width)))) if width > 0 else places
        median, least, most = (format_fixed(number, places) for number in (value.median, value.least, value.most))
        # No-break spaces keep lines from breaking beside the dash.
        return median if least == most else f"{median}{_SPACE}({least}{_SPACE}–{_SPACE}{most})"
    if isinstance(value, Interval):
        return format_bounds(value.low, value.high, f"{_SPACE}–{_SPACE}")
    if isinstance(value, SignedChange):
        return format_change(value, unit)
    return format_number(value, unit)


def format_change(change: SignedChange, unit: Unit, interval_name: str = "") -> str:
    """Returns a change with its sign, and its interval in brackets after a name: −14.90 (−15.10 to −14.70)."""
    bounds = [bound for bound in (change.low, change.high) if bound is not None]
    largest_value = max(map(abs, (change.value, *bounds)))
    scale, suffix, places = 1, "", _decimal_places(largest_value)
    if unit == "percent":
        scale, suffix, places = 100, f"{_SPACE}%", 1 if largest_value < 1 else 0
    signed_numbers = []
    for number in (change.value, *bounds):
        sign = "+" if round(scale * number, places) > 0 else ""
        signed_numbers.append(f"{sign}{format_fixed(scale * number, places)}{suffix}")
    value, *interval = signed_numbers
    return f"{value} ({interval_name}{' to '.join(interval)})" if len(interval) == 2 else value


def format_bounds(low: float, high: float, dash: str = "–") -> str:
    """Returns both bounds without a unit, with two or three significant digits, as needed to tell them apart.

    If both bounds are equal with these digits, returns one number.
    """
    low, high = round(low, MAX_DECIMALS), round(high, MAX_DECIMALS)
    magnitude = math.floor(math.log10(high)) if high > 0 else 0
    distinguishing = -math.floor(math.log10(high - low)) if high > low else 2 - magnitude
    places = min(max(1 - magnitude, distinguishing, 0), max(2 - magnitude, 0))
    least, most = (format_fixed(number, places) for number in (low, high))
    return least if least == most else f"{least}{dash}{most}"


def format_number(value: float, unit: Unit) -> str:
    """Returns a number in the digits that suit its unit, with the unit unless it is a time.

    The unit of a time is part of the column's title.
    """
    if unit == "count":
        return format_fixed(value, 0 if abs(value - round(value)) < 0.005 else 1)
    if unit == "percent":
        return rounded_percent(value, 1)
    if unit == "bar":
        return "\N{DARK SHADE}" * max(round(value * _FULL_BAR_LENGTH), 1)
    if unit in ("flop", "flop/s"):
        return _format_scaled(value, "FLOP" + ("/s" if unit == "flop/s" else ""))
    if unit == "bytes":
        return format_bytes(value)
    if unit == "bytes/s":
        return _format_scaled(value, "B/s")
    digits = format_fixed(value, _decimal_places(value))
    return f"{digits}×" if unit == "factor" else f"{digits}{_SPACE}J" if unit == "J" else digits


def _decimal_places(value: float) -> int:
    """Returns the decimal places that give a number at least four digits: 5.335, 40.19, 3,100.2."""
    return 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1


def _format_scaled(value: float, unit: str) -> str:
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in _DECIMAL_PREFIXES if abs(value) >= scale * _PREFIX_THRESHOLD), (1.0, "")
    )
    return f"{rounded(value / scale)}{_SPACE}{prefix}{unit}"


def format_count(number: float, noun: str) -> str:
    """Returns a number with its noun, for sentences: 1 launch, 0.5 launches, 644 launches."""
    written = format_number(number, "count")
    return f"{written}{_SPACE}{plural(1 if written == '1' else number, noun)}"


def shorten_shapes(shapes: str) -> str:
    """Returns the shapes of an operator's first tensors, and the number of the other tensors."""
    tensors = shapes.split(" · ")
    hidden = len(tensors) - _MAX_SHAPES
    if hidden <= 0:
        return shapes
    *_, dtype = tensors[-1].partition(" ")
    return f"{' · '.join(tensors[:_MAX_SHAPES])} and {hidden} more {dtype}".strip()


def format_ms_range(low: float, high: float) -> str:
    """Returns two bounds of a time with its unit, for sentences: 41–45 ms."""
    return f"{format_bounds(low, high)}{_SPACE}ms"


def format_ms(value: float) -> str:
    """Returns a time in three digits with its unit, for sentences: 88 ms, 9.37 ms."""
    return f"{rounded(value)}{_SPACE}ms"


def format_percent(value: float) -> str:
    """Returns a fraction as a percentage with one decimal place, for sentences: 23.9 %."""
    return format_number(value, "percent")
